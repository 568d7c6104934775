"""Checkpoints: exact round trips, and nothing lost by crashes, full disks, damage and SIGKILL."""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from bcnet.errors import BcnetError
from bcnet.training.checkpoint import exists, load, save


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved(folder: Path, count: int = 2) -> Path:
    for step in range(1, count + 1):
        save(folder, {"w": torch.full((3,), float(step))}, {"step": step})
    return folder


def test_round_trip_of_all_dtypes(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "transposed": torch.rand(3, 5).T}
    tensors["view"] = tensors["transposed"][1:]
    tensors["last"] = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    state = {"step": 3, "loss": float("inf"), "text": "größer", "deep": [{"a": None}]}
    assert not exists(tmp_path / "new")
    path = save(tmp_path / "new", tensors, state)
    assert exists(tmp_path / "new")
    assert names(path) == ["manifest.json", "state.json", "tensors.safetensors"]
    found, found_state = load(tmp_path / "new")
    assert found_state == state
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in tensors.items())


def test_nothing_to_save_is_fine(tmp_path: Path) -> None:
    save(tmp_path, {}, {})
    assert load(tmp_path) == ({}, {})


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    assert names(tmp_path) == ["checkpoint-000004", "checkpoint-000005"]
    assert load(tmp_path)[1] == {"step": 5}


def test_numbers_beyond_six_digits_are_in_order(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "checkpoint-000001").rename(tmp_path / "checkpoint-999999")
    save(tmp_path, {}, {"step": 3})
    assert names(tmp_path) == ["checkpoint-1000000", "checkpoint-999999"]
    assert load(tmp_path)[1] == {"step": 3}


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".writing-checkpoint-000007").mkdir()
    saved(tmp_path, 3)
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-000003", "checkpoint-12", "notes.txt"]


@pytest.mark.parametrize("where", ["replace", "fsync", "mkdir"])
def test_a_crash_while_saving_leaves_the_one_before(tmp_path: Path, monkeypatch: Any, where: str) -> None:
    saved(tmp_path, 1)

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, where, crash)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, {}, {"step": 2})
    assert names(tmp_path) == ["checkpoint-000001"]
    assert load(tmp_path)[1] == {"step": 1}


def failing(monkeypatch: Any, number: int) -> None:
    """Make writing fail after some bytes, as a disk does."""
    original = builtins.open

    def opened(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        file = original(path, mode, *rest, **more)
        if "w" not in mode:
            return file

        class Full:
            def __enter__(self) -> Full:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, data: bytes) -> int:
                file.write(data[: len(data) // 2])
                raise OSError(number, os.strerror(number))

        return Full()

    monkeypatch.setattr(builtins, "open", opened)


FULL = "no space is left for a checkpoint in {}: free some and resume, the checkpoint before it is kept"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            errno.ENOSPC,
            "no space is left for a checkpoint in {}: free some and resume, the checkpoint before it is kept",
        ),
        (
            errno.EDQUOT,
            "no space is left for a checkpoint in {}: free some and resume, the checkpoint before it is kept",
        ),
        (
            errno.EROFS,
            "cannot write a checkpoint in {} (Read-only file system): choose a folder you may write to",
        ),
        (errno.EACCES, "cannot write a checkpoint in {} (Permission denied): choose a folder you may write to"),
        (
            errno.EIO,
            "cannot write a checkpoint in {} (Input/output error): fix that and resume, "
            "the checkpoint before it is kept",
        ),
    ],
)
def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: Any, number: int, message: str) -> None:
    saved(tmp_path, 2)
    with monkeypatch.context() as patched:
        failing(patched, number)
        with pytest.raises(BcnetError) as error:
            save(tmp_path, {"w": torch.zeros(3)}, {"step": 3})
    assert str(error.value) == message.format(tmp_path)
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]
    assert load(tmp_path)[1] == {"step": 2}


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BcnetError, match=r"^cannot write a checkpoint in .*file: a file is where a folder should be, so move it away"
    ):
        save(tmp_path / "file", {}, {})
    with pytest.raises(BcnetError, match=r"^there is no checkpoint in"):
        load(tmp_path / "file")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_damage_to_the_newest_falls_back_and_says_so(tmp_path: Path, harm: Any, name: str) -> None:
    saved(tmp_path)
    harm(tmp_path / "checkpoint-000002" / name)
    with pytest.warns(UserWarning, match="checkpoint-000002 .*; checkpoint-000001 was loaded instead"):
        tensors, state = load(tmp_path)
    assert state == {"step": 1}
    assert tensors["w"].tolist() == [1, 1, 1]
    save(tmp_path, {}, {"step": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path)[1] == {"step": 3}


def test_the_warning_names_the_damage(tmp_path: Path) -> None:
    saved(tmp_path)
    truncate(tmp_path / "checkpoint-000002" / "tensors.safetensors")
    with pytest.warns(UserWarning, match="is damaged") as caught:
        load(tmp_path)
    assert str(caught[0].message) == (
        f"in {tmp_path} checkpoint-000002 is damaged (tensors.safetensors does not match its checksum); "
        "checkpoint-000001 was loaded instead"
    )


def test_no_checkpoint_is_left(tmp_path: Path) -> None:
    with pytest.raises(BcnetError) as error:
        load(tmp_path)
    assert str(error.value) == (
        f"there is no checkpoint in {tmp_path}: nothing was saved there yet, or the folder is another"
    )
    saved(tmp_path)
    truncate(tmp_path / "checkpoint-000001" / "state.json")
    (tmp_path / "checkpoint-000002" / "manifest.json").unlink()
    with pytest.raises(BcnetError) as error:
        load(tmp_path)
    assert str(error.value) == (
        f"no checkpoint in {tmp_path} can be read: "
        "checkpoint-000002 is damaged (manifest.json: No such file or directory), "
        "checkpoint-000001 is damaged (state.json does not match its checksum); remove the folder to start anew"
    )


def forge(folder: Path, tensors: bytes = b"", state: bytes = b"{}", manifest: bytes | None = None) -> None:
    """A checkpoint whose checksums are right, whatever it holds."""
    path = folder / "checkpoint-000009"
    path.mkdir(parents=True)
    files = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in (("tensors.safetensors", tensors), ("state.json", state))
    }
    honest = json.dumps({"format": "bcnet.checkpoint", "version": 1, "files": files}).encode()
    (path / "tensors.safetensors").write_bytes(tensors)
    (path / "state.json").write_bytes(state)
    (path / "manifest.json").write_bytes(honest if manifest is None else manifest)


HOSTILE_JSON = [b"", b"[", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 200_000, b"9" * 10_000]


@pytest.mark.parametrize("text", HOSTILE_JSON, ids=range(len(HOSTILE_JSON)))
def test_hostile_json(tmp_path: Path, text: bytes) -> None:
    forge(tmp_path / "manifest", manifest=text)
    forge(tmp_path / "state", tensors=(8).to_bytes(8, "little") + b"{}      ", state=text)
    for folder in ("manifest", "state"):
        with pytest.raises(BcnetError, match=rf"^no checkpoint in .* is damaged \({folder}.json is not (a )?JSON"):
            load(tmp_path / folder)


@pytest.mark.parametrize(
    "manifest",
    [
        b"{}",
        b'{"format": "bcnet.checkpoint", "version": 2}',
        b'{"format": "bcnet.checkpoint", "version": {"a": 1}}',
        b'{"format": "bcnet.checkpoint", "version": 1}',
        b'{"format": "bcnet.checkpoint", "version": 1, "files": 3}',
        b'{"format": "bcnet.checkpoint", "version": 1, "files": {"../../x": 1}}',
    ],
)
def test_hostile_manifest(tmp_path: Path, manifest: bytes) -> None:
    forge(tmp_path, manifest=manifest)
    with pytest.raises(BcnetError, match=f"^no checkpoint in {tmp_path} can be read: checkpoint-000009 "):
        load(tmp_path)


@pytest.mark.parametrize("tensors", [b"", b"\x80\x04N.", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"])
def test_hostile_tensors(tmp_path: Path, tensors: bytes) -> None:
    forge(tmp_path, tensors=tensors)
    with pytest.raises(BcnetError, match=r"000009 is damaged \(tensors.safetensors is not a safetensors file\)"):
        load(tmp_path)


def test_state_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(BcnetError) as error:
        save(tmp_path, {}, {"a": {1, 2}})
    assert str(error.value) == (
        "the state of a checkpoint must be JSON (Object of type set is not JSON serializable): pack it first"
    )
    assert not exists(tmp_path)


SAVE_FOREVER = """
import sys, torch
from bcnet.training.checkpoint import save
for step in range(1, 1_000_000):
    save(sys.argv[1], {"w": torch.full((50_000,), float(step))}, {"step": step})
    print(step, flush=True)
"""


def test_sigkill_while_saving(tmp_path: Path) -> None:
    """Killed at random moments, again and again, the last reported checkpoint or a later one is there."""
    rng = random.Random(0)
    root = Path(__file__).parents[2]
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(folder)], stdout=subprocess.PIPE, text=True, cwd=root
        )
        assert process.stdout is not None
        reported = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        reported = max([reported, *(int(line) for line in process.stdout.read().split())])
        process.wait()
        process.stdout.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensors, state = load(folder)
        assert state["step"] in (reported, reported + 1)
        assert (tensors["w"] == state["step"]).all()
        save(folder, {}, {"step": -1})
        assert load(folder)[1] == {"step": -1}
        assert not list(folder.glob(".*"))
