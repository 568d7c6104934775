"""CIFAR-10 from a folder in any of its three forms: binary, pickled batches, or parquet files.

All are turned into rows of the official binary form: one label and 3,072 pixel values (channels, rows, columns).
Parquet holds compressed images, so their rows are cached once decoded.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import pickletools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bcnet.data.source import ImageSet, Labelled, check_labels
from bcnet.errors import BcnetError, first_line
from bcnet.utils.files import read_regular, user_cache, write_file

MEAN = (0.4914 * 255, 0.4822 * 255, 0.4465 * 255)
STD = (0.2470 * 255, 0.2435 * 255, 0.2616 * 255)
CLASSES = 10
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

Records = NDArray[np.uint8]
_ROW = 1 + 3 * 32 * 32
_DIGEST = 32
_MOST_ROWS = 10**6
"""The most images that a parquet file may claim to hold."""
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_TRAIN = [f"data_batch_{number}" for number in range(1, 6)]


def read_cifar10(folder: Path) -> ImageSet:
    """Training and test images (n, 3, 32, 32) from ``folder`` or the official folder within it."""
    places = [
        folder,
        *(folder / name for name in ("cifar-10-batches-bin", "cifar-10-batches-py", "plain_text", "data")),
    ]
    for place in places:
        if (place / "data_batch_1.bin").is_file():
            return _parts(place, [f"{name}.bin" for name in _TRAIN], ["test_batch.bin"], _read_binary)
        if (place / "data_batch_1").is_file():
            return _parts(place, _TRAIN, ["test_batch"], _read_pickled)
        train, test = (sorted(path.name for path in place.glob(f"{part}*.parquet")) for part in ("train", "test"))
        if train:
            return _parts(place, train, test or ["test.parquet"], _read_parquet)
    raise BcnetError(
        f"{folder} holds no CIFAR-10: data_batch_1.bin (binary version), data_batch_1 (Python version) "
        "or train.parquet was looked for"
    )


def _parts(folder: Path, train: list[str], test: list[str], read: Callable[[Path], Records]) -> ImageSet:
    for name in train + test:
        if not (folder / name).is_file():
            raise BcnetError(f"CIFAR-10 in {folder} is incomplete: {name} is missing")
    return ImageSet(
        train=_unpack([read(folder / name) for name in train]),
        test=_unpack([read(folder / name) for name in test]),
        classes=CLASSES,
        mean=MEAN,
        std=STD,
        crop=4,
        flip=True,
        names=NAMES,
    )


def _unpack(parts: list[Records]) -> Labelled:
    rows = np.concatenate(parts)
    return Labelled(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64))


def _pack(images: Records, labels: list[Any], path: Path) -> Records:
    """Images (n, 3072) and labels (n) as rows (n, 3073)."""
    if not all(isinstance(label, int) and abs(label) < 2**31 for label in labels):
        raise BcnetError(f"{path} has labels that are not whole numbers")
    numbers = np.array(labels, dtype=np.int64)
    if images.shape != (len(numbers), _ROW - 1) or not len(numbers):
        raise BcnetError(f"{path} does not hold one label for every image of 3 x 32 x 32 values")
    _check_labels(numbers, path)
    return np.concatenate([numbers[:, None].astype(np.uint8), images], axis=1)


def _check_labels(labels: NDArray[Any], path: Path) -> None:
    try:
        check_labels(labels, CLASSES)
    except BcnetError as error:
        raise BcnetError(f"{path}: {error}") from None


def _read_binary(path: Path) -> Records:
    values = np.fromfile(path, dtype=np.uint8)
    if not len(values) or len(values) % _ROW:
        raise BcnetError(f"{path} is not a whole number of CIFAR-10 records of {_ROW:,} bytes: download it again")
    rows = values.reshape(-1, _ROW)
    _check_labels(rows[:, 0], path)
    return rows


class _PickledDtype:
    """Stands in for numpy.dtype while unpickling; it accepts unsigned bytes only."""

    def __init__(self, kind: str | bytes, *_: object):
        if kind not in ("u1", b"u1"):
            raise pickle.UnpicklingError("an array of another type than bytes")

    def __setstate__(self, state: object) -> None:
        pass


class _PickledArray:
    """Stands in for numpy.ndarray while unpickling: its raw bytes as an array, without any code of numpy's."""

    def __init__(self, *_: object):
        self.values = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _PickledDtype, bool, bytes]) -> None:
        _, shape, dtype, fortran, values = state
        if not isinstance(dtype, _PickledDtype) or not isinstance(values, bytes):
            raise pickle.UnpicklingError("an array of another type than bytes")
        self.values = np.frombuffer(values, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _CifarUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings, numbers and byte arrays, and refuses everything else.

    The official Python version of CIFAR-10 is pickled. Plain pickle runs whatever a file names; this one
    resolves the three names an array needs, to the stand-ins above, so that no function of any library is
    reachable from a file.
    """

    def __init__(self, file: BinaryIO):
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "dtype"):
            return _PickledDtype
        if (module, name) == ("numpy", "ndarray") or (module in _MULTIARRAY and name == "_reconstruct"):
            return _PickledArray
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only arrays, lists and strings are read")


def _check_memo(data: bytes) -> None:
    """A few bytes can ask for a memo of gigabytes, so its indices may not exceed the size of the file."""
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(data):
            raise pickle.UnpicklingError("it asks for more memory than it can need")


def _read_pickled(path: Path) -> Records:
    try:
        pickled = read_regular(path)
        _check_memo(pickled)
        content = _CifarUnpickler(io.BytesIO(pickled)).load()
    except Exception as error:  # a damaged or hostile file can fail in any way
        reason = str(error)[:120] or "unreadable"
        raise BcnetError(f"{path} is not a batch of CIFAR-10's Python version: {reason}") from None
    fields = content if isinstance(content, dict) else {}
    data = fields.get(b"data", fields.get("data"))
    labels = fields.get(b"labels", fields.get("labels"))
    if not isinstance(data, _PickledArray) or not isinstance(labels, list):
        raise BcnetError(f"{path} is not a batch of CIFAR-10's Python version: it lacks data or labels")
    return _pack(data.values, labels, path)


def _read_parquet(path: Path) -> Records:
    """Records of a parquet file with columns img {bytes, path} and label, decoded once and then from the cache."""
    stat = path.stat()
    identity = f"1 {path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    name = f"cifar10-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.rows"
    cached = user_cache() / name
    if cached.is_file():
        rows = _read_cached(cached)
        if rows is not None:
            return rows
        warnings.warn(f"the cache file {cached} is damaged; {path} is decoded again", stacklevel=2)
    rows = _decode_parquet(path)
    try:
        data = rows.tobytes()
        write_file(cached, hashlib.sha256(data).digest() + data)
    except OSError as error:
        warnings.warn(f"decoded images could not be cached in {cached.parent}: {error.strerror}", stacklevel=2)
    return rows


def _read_cached(path: Path) -> Records | None:
    """Decoded rows, stored after their digest; None where they are not what was written."""
    try:
        data = read_regular(path)
    except OSError:
        return None
    digest, values = data[:_DIGEST], data[_DIGEST:]
    if not values or len(values) % _ROW or hashlib.sha256(values).digest() != digest:
        return None
    return np.frombuffer(values, dtype=np.uint8).reshape(-1, _ROW)


def _decode_parquet(path: Path) -> Records:
    try:
        import pyarrow
        import pyarrow.parquet
        from PIL import Image
    except ImportError:
        raise BcnetError("parquet files are read with pyarrow and pillow: pip install 'bcnet[parquet]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            held = file.metadata
            size = sum(held.row_group(number).total_byte_size for number in range(held.num_row_groups))
            if max(held.num_rows, size // _ROW) > _MOST_ROWS:
                raise BcnetError(f"{path} says that it holds over {_MOST_ROWS:,} images: CIFAR-10 has 60,000")
            table = file.read()
        names = table.column_names
        labels = table["label"].to_pylist() if "label" in names else []
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # strings may not be UTF-8
        if isinstance(error, BcnetError):
            raise
        reason = first_line(error)
        raise BcnetError(f"{path} is not a parquet file: {reason:.200}") from None
    column = next((name for name in ("img", "image") if name in names), None)
    if column is None or "label" not in names:
        found = ", ".join(" ".join(name.split()) for name in names)
        raise BcnetError(f"{path} needs columns img and label, but has {found or 'none':.200}")
    images = np.empty((len(table), _ROW - 1), dtype=np.uint8)
    for number, entry in enumerate(table[column]):
        try:
            with Image.open(io.BytesIO(entry.as_py()["bytes"])) as image:
                pixels = np.asarray(image) if image.size == (32, 32) else np.empty((*image.size[::-1], 0))
        except Exception:  # decoders fail in many ways, all of which mean a broken image
            raise BcnetError(f"image {number} of {path} is broken: replace the file") from None
        if pixels.shape != (32, 32, 3):
            raise BcnetError(f"image {number} of {path} has shape {pixels.shape}, but CIFAR-10 has (32, 32, 3)")
        images[number] = pixels.transpose(2, 0, 1).reshape(-1)
    return _pack(images, labels, path)
