"""CIFAR-10 in its three forms, its cache, and what is said of bad files."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import message, pairs
from torch import Tensor

from bcnet.data import Data, LoadOptions, load_data
from bcnet.data import cifar10 as cifar10_module

SHARED = Path(__file__).parents[3] / "shared" / "data"
SMALL = LoadOptions(batch_size=4, eval_batch_size=5, crop=0, flip=False, image_size=8, workers=0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# CIFAR-10: 8 images a training batch, 6 in the test batch.


def cifar_rows(part: int) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(part)
    n = 6 if part == 6 else 8
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n).tolist()


def write_binary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], 1):
        images, labels = cifar_rows(part)
        rows = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], images], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def python2_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 pickled it, whose texts are bytes: the form of the official files."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b")
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(images.shape[0]) + number(images.shape[1]) + b"\x86"
    array = reconstruct + b"\x87R(" + number(1) + shape + dtype + b"\x89" + text(images.tobytes()) + b"tb"
    values = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + values + b"u."


def write_pickled(folder: Path, python2: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], 1):
        images, labels = cifar_rows(part)
        modern = pickle.dumps({"data": np.asfortranarray(images), "labels": labels, "batch_label": name}, protocol=4)
        (folder / name).write_bytes(python2_pickle(images, labels) if python2 else modern)


def encoded(pixels: np.ndarray) -> bytes:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    buffer = io.BytesIO()
    image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_parquet(path: Path, images: list[bytes], labels: list[Any], column: str = "img") -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(images)]
    parquet.write_table(pyarrow.table({column: cells, "label": labels}), path)


def write_cifar_parquet(folder: Path, column: str = "img") -> None:
    parts = {"train-00000-of-00002": (1, 2, 3), "train-00001-of-00002": (4, 5), "test-00000-of-00001": (6,)}
    for name, numbers in parts.items():
        rows = [cifar_rows(number) for number in numbers]
        images = [encoded(row.reshape(3, 32, 32).transpose(1, 2, 0)) for part, _ in rows for row in part]
        write_parquet(folder / f"{name}.parquet", images, [label for _, labels in rows for label in labels], column)


def everything(data: Data) -> list[Tensor]:
    return [t for part in (data.whole, data.val, data.test) for pair in pairs(part) for t in pair]


def test_all_forms_of_cifar10_hold_the_same(tmp_path: Path) -> None:
    write_binary(tmp_path / "a" / "cifar-10-batches-bin")
    write_pickled(tmp_path / "b" / "cifar-10-batches-py")
    write_pickled(tmp_path / "c", python2=False)
    write_cifar_parquet(tmp_path / "d" / "plain_text")
    write_cifar_parquet(tmp_path / "e", column="image")
    options = LoadOptions(batch_size=40, crop=0, flip=False)
    found = [everything(load_data(f"cifar10:{tmp_path / name}", options=options)) for name in "abcde"]
    assert [t.shape for t in found[0][::2]] == [(40, 3, 32, 32), (4, 3, 32, 32), (6, 3, 32, 32)]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    images, labels = cifar_rows(6)
    mean, std = (torch.tensor(t).view(3, 1, 1) for t in (cifar10_module.MEAN, cifar10_module.STD))
    x, y = pairs(load_data(f"cifar10:{tmp_path / 'a'}", options=options).test)[0]
    shown = {
        (int(label), *(image * std + mean).round().int().flatten().tolist()) for image, label in zip(x, y, strict=True)
    }
    assert shown == {(label, *row.tolist()) for row, label in zip(images, labels, strict=True)}


def test_cifar10_is_cropped_and_mirrored_unless_told_otherwise(tmp_path: Path) -> None:
    write_binary(tmp_path)
    usual = load_data(f"cifar10:{tmp_path}").train
    plain = load_data(f"cifar10:{tmp_path}", options=LoadOptions(crop=0, flip=False)).train
    assert (usual.options.crop, usual.options.flip) == (4, True)  # type: ignore[attr-defined]
    assert (plain.options.crop, plain.options.flip) == (0, False)  # type: ignore[attr-defined]


def test_decoded_parquet_is_cached_until_the_file_changes(tmp_path: Path, monkeypatch: Any) -> None:
    write_cifar_parquet(tmp_path / "set")
    name = f"cifar10:{tmp_path / 'set'}"
    first = everything(load_data(name, options=SMALL))
    cached = sorted((tmp_path / "cache" / "bcnet").iterdir())
    assert [path.suffix for path in cached] == [".rows"] * 3
    decoded: list[Path] = []
    original = cifar10_module._decode_parquet
    monkeypatch.setattr(cifar10_module, "_decode_parquet", lambda path: (decoded.append(path), original(path))[1])
    assert all(torch.equal(a, b) for a, b in zip(first, everything(load_data(name, options=SMALL)), strict=True))
    assert decoded == []
    changed = tmp_path / "set" / "test-00000-of-00001.parquet"
    os.utime(changed, (1, 1))
    load_data(name)
    assert decoded == [changed]
    for number, path in enumerate(cached):
        data = bytearray(path.read_bytes())
        data[-9] ^= 1  # one bit of a pixel
        path.write_bytes(data if number else data[:-100])
    with pytest.warns(
        UserWarning, match=r"^the cache file .* is damaged; .*-0000[01]-of-00002.parquet is decoded again$"
    ):
        again = everything(load_data(name, options=SMALL))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_data(name)


def test_a_cache_is_never_unpickled(tmp_path: Path) -> None:
    write_cifar_parquet(tmp_path / "set")
    load_data(f"cifar10:{tmp_path / 'set'}")
    for path in (tmp_path / "cache" / "bcnet").iterdir():
        with path.open("wb") as file:
            np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.warns(UserWarning, match="is damaged"):
        load_data(f"cifar10:{tmp_path / 'set'}")


def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    write_cifar_parquet(tmp_path / "set")
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.warns(UserWarning, match=r"^decoded images could not be cached in .*bcnet: Not a directory$"):
        data = load_data(f"cifar10:{tmp_path / 'set'}")
    assert data.classes == 10


def test_incomplete_cifar10(tmp_path: Path) -> None:
    assert message(lambda: load_data(f"cifar10:{tmp_path}")) == (
        f"{tmp_path} holds no CIFAR-10: data_batch_1.bin (binary version), data_batch_1 (Python version) "
        "or train.parquet was looked for"
    )
    write_binary(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    assert message(lambda: load_data(f"cifar10:{tmp_path}")) == (
        f"CIFAR-10 in {tmp_path} is incomplete: test_batch.bin is missing"
    )


@pytest.mark.parametrize("data", [b"", b"\0" * 3072, b"\0" * 6147])
def test_a_truncated_binary_batch(tmp_path: Path, data: bytes) -> None:
    write_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(data)
    assert message(lambda: load_data(f"cifar10:{tmp_path}")) == (
        f"{tmp_path / 'data_batch_3.bin'} is not a whole number of CIFAR-10 records of 3,073 bytes: download it again"
    )


def test_a_binary_label_out_of_range(tmp_path: Path) -> None:
    write_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(b"\x0a" * 3073)
    assert message(lambda: load_data(f"cifar10:{tmp_path}")) == (
        f"{tmp_path / 'data_batch_3.bin'}: label 10 is out of range: 10 classes have labels 0..9"
    )


class Hostile:
    def __init__(self, call: Any, *arguments: Any):
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write_pickled(tmp_path)
    path, victim = tmp_path / "data_batch_2", tmp_path / "victim"
    for hostile in (
        Hostile(os.mkdir, str(victim)),
        Hostile(eval, f"__import__('os').mkdir({str(victim)!r})"),
        Hostile(getattr, "text", "upper"),
        Hostile(np.memmap, str(victim), "uint8", "w+", 0, 4),
    ):
        path.write_bytes(pickle.dumps({"data": hostile, "labels": [1]}))
        text = message(lambda: load_data(f"cifar10:{tmp_path}"))
        assert text.startswith(f"{path} is not a batch of CIFAR-10's Python version: it names ")
        assert text.endswith(", and only arrays, lists and strings are read")
    assert not victim.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "pickle exhausted before seeing STOP"),
        (b"no pickle", None),
        (pickle.dumps([1, 2]), "it lacks data or labels"),
        (pickle.dumps({"data": [1], "labels": [1]}), "it lacks data or labels"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8)}), "it lacks data or labels"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}), "an array of another type than bytes"),
        (pickle.dumps({"data": np.array([[1, "a"]], object), "labels": [1]}), "an array of another type than bytes"),
    ],
)
def test_bad_pickled_batches(tmp_path: Path, content: bytes, reason: str | None) -> None:
    write_pickled(tmp_path)
    path = tmp_path / "data_batch_2"
    path.write_bytes(content)
    text = message(lambda: load_data(f"cifar10:{tmp_path}"))
    assert text.startswith(f"{path} is not a batch of CIFAR-10's Python version: {reason or ''}")


@pytest.mark.parametrize(
    ("images", "labels", "text"),
    [
        ((2, 3072), [1, 10], ": label 10 is out of range: 10 classes have labels 0..9"),
        ((2, 3072), [-1, 1], ": label -1 is out of range: 10 classes have labels 0..9"),
        ((2, 3072), [1], " does not hold one label for every image of 3 x 32 x 32 values"),
        ((2, 1024), [1, 2], " does not hold one label for every image of 3 x 32 x 32 values"),
        ((0, 3072), [], " does not hold one label for every image of 3 x 32 x 32 values"),
        ((1, 3072), [2.5], " has labels that are not whole numbers"),
        ((1, 3072), [10**30], " has labels that are not whole numbers"),
    ],
)
def test_bad_values_in_pickled_batches(tmp_path: Path, images: tuple[int, int], labels: list[Any], text: str) -> None:
    write_pickled(tmp_path)
    path = tmp_path / "data_batch_2"
    path.write_bytes(pickle.dumps({"data": np.zeros(images, np.uint8), "labels": labels}))
    assert message(lambda: load_data(f"cifar10:{tmp_path}")) == f"{path}{text}"


def test_bad_parquet(tmp_path: Path) -> None:
    pixels = cifar_rows(1)[0][0].reshape(32, 32, 3)
    good, grey = encoded(pixels), encoded(pixels[..., 0])
    path = tmp_path / "train.parquet"
    for images, labels, column, text in (
        ([good, grey], [0, 1], "img", f"image 1 of {path} has shape (32, 32), but CIFAR-10 has (32, 32, 3)"),
        ([good, good[:2000]], [0, 1], "img", f"image 1 of {path} is broken: replace the file"),
        ([good, b"text"], [0, 1], "img", f"image 1 of {path} is broken: replace the file"),
        ([good, good], [0, 11], "img", f"{path}: label 11 is out of range: 10 classes have labels 0..9"),
        ([good, good], [0, None], "img", f"{path} has labels that are not whole numbers"),
        ([good], [0], "picture", f"{path} needs columns img and label, but has picture, label"),
    ):
        write_parquet(path, images, labels, column)
        write_parquet(tmp_path / "test.parquet", [good], [0])
        assert message(lambda: load_data(f"cifar10:{tmp_path}")) == text
    path.write_bytes(b"no parquet")
    assert message(lambda: load_data(f"cifar10:{tmp_path}")).startswith(f"{path} is not a parquet file: ")
    (tmp_path / "test.parquet").unlink()
    assert message(lambda: load_data(f"cifar10:{tmp_path}")) == (
        f"CIFAR-10 in {tmp_path} is incomplete: test.parquet is missing"
    )


def test_parquet_without_its_extra(tmp_path: Path, monkeypatch: Any) -> None:
    write_cifar_parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert message(lambda: load_data(f"cifar10:{tmp_path}")) == (
        "parquet files are read with pyarrow and pillow: pip install 'bcnet[parquet]'"
    )


@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason=f"{SHARED / 'cifar10'} is not there")
def test_the_real_cifar10_test_set() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rows = cifar10_module._read_parquet(SHARED / "cifar10" / "test.parquet")
    assert rows.shape == (10_000, 3073)
    assert np.bincount(rows[:, 0]).tolist() == [1000] * 10
    assert rows[:8, 0].tolist() == [3, 8, 8, 0, 6, 6, 1, 6]
    means = rows[:, 1:].reshape(-1, 3, 1024).mean(axis=(0, 2))
    assert np.abs(means - cifar10_module.MEAN).max() < 1.5


def test_a_pickle_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    write_pickled(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    told = message(lambda: load_data(f"cifar10:{tmp_path}", options=SMALL))
    assert told.endswith("is not a batch of CIFAR-10's Python version: it asks for more memory than it can need")
