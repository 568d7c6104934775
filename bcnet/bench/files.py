"""Where tables lie: finding, fetching and writing their files."""

from __future__ import annotations

import http.client
import os
import urllib.request
from pathlib import Path

from bcnet.bench.spaces import RELEASED, BenchSpace, get_space
from bcnet.errors import BcnetError
from bcnet.space.widths import WidthSpace
from bcnet.utils.files import clear_errors, digest, user_cache, write_file

REPOSITORY = "https://github.com/xiusu/Channel-Bench-Macro"
URL = "https://raw.githubusercontent.com/xiusu/Channel-Bench-Macro/HEAD"
FOLDER_VARIABLE = "CHANNEL_BENCH_DIR"
TIMEOUT_SECONDS = 30
MAX_DOWNLOAD = 64 * 2**20


def cache_folder() -> Path:
    """The folder of fetched tables."""
    return user_cache() / "channel-bench-macro"


def find_table(space: BenchSpace, path: str | os.PathLike[str] | None = None) -> Path:
    """The file of a space's table: ``path`` (a file, or a folder of released files), else the folder
    ``$CHANNEL_BENCH_DIR``, else the user cache. The first of these that is named is the only one tried."""
    if path is not None:
        place = Path(path)
        if not place.exists():
            raise BcnetError(f"there is no table at {place}: name an existing file, or a folder of released tables")
        return _in_folder(space, place) if place.is_dir() else place
    if folder := os.environ.get(FOLDER_VARIABLE):
        return _in_folder(space, Path(folder), f", which {FOLDER_VARIABLE} names")
    if space.file is None:
        raise BcnetError(f"space {space.name!r} has no released table: name the file of its table")
    cached = cache_folder() / space.file
    if not cached.is_file():
        raise BcnetError(
            f"the table of space {space.name!r} is not on this machine: fetch it with "
            f"'bcnet bench fetch {space.name}', name its file with --table, or set {FOLDER_VARIABLE} to its folder"
        )
    return cached


def fetch(space: str | WidthSpace, folder: str | os.PathLike[str] | None = None, url: str = URL) -> Path:
    """Downloads the released table of a space into ``folder`` (the user cache) and returns its file.

    A file that is there and is the released one is kept; any other of its name is replaced. Nothing is
    written unless the checksum of the download is right.
    """
    wanted = RELEASED.get(str(space)) or get_space(space)
    if wanted.file is None or wanted.sha256 is None:
        name = getattr(wanted, "name", space)
        raise BcnetError(f"space {name!r} has no released table to fetch: name the file of its table instead")
    target = Path(folder or cache_folder()) / wanted.file
    with clear_errors(str(target)):
        if target.is_file() and digest(target.read_bytes()) == wanted.sha256:
            return target
        content = _download(f"{url}/{wanted.file}")
        found = digest(content)
        if found != wanted.sha256:
            raise BcnetError(
                f"{url}/{wanted.file} is not the released table (SHA-256 {found[:12]}, expected "
                f"{wanted.sha256[:12]}), so nothing was written: get the file from {REPOSITORY} "
                f"and name it with --table"
            )
        write_file(target, content)
    return target


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(MAX_DOWNLOAD + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise BcnetError(
            f"cannot download {url} ({reason}): on a machine with a network get the file from {REPOSITORY}, "
            f"then name it with --table or set {FOLDER_VARIABLE} to its folder"
        ) from None
    if len(content) > MAX_DOWNLOAD:
        raise BcnetError(f"{url} is larger than {MAX_DOWNLOAD:,} bytes and cannot be a released table")
    return content


def _in_folder(space: BenchSpace, folder: Path, origin: str = "") -> Path:
    if space.file is None:
        raise BcnetError(f"space {space.name!r} has no released table to look for in {folder}: name the file itself")
    if not (folder / space.file).is_file():
        raise BcnetError(f"there is no {space.file} in {folder}{origin}")
    return folder / space.file
