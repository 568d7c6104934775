"""Image folders: their parts, their augmentation, and what is said of bad ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import message, pairs
from torch import Tensor

from bcnet.data import Data, LoadOptions, Source, load_data

SMALL = LoadOptions(batch_size=4, eval_batch_size=5, crop=0, flip=False, image_size=8, workers=0)


def same(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(other) > 0 and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True)
    )


# Image folders: two classes of one colour each, in train, val and test.


def write_images(root: Path, part: str, counts: dict[str, int], mode: str = "RGB") -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    rng = np.random.default_rng(sum(counts.values()))
    for number, (name, count) in enumerate(counts.items()):
        folder = root / part / name
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = rng.integers(0, 60, (12, 16, 3), dtype=np.uint8)
            pixels[..., number] += 180
            image.fromarray(pixels).convert(mode).save(folder / f"{i}.{'png' if i % 2 else 'JPG'}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_images(tmp_path, "train", {"apple": 12, "pear": 8})
    write_images(tmp_path, "val", {"apple": 3, "pear": 4})
    return tmp_path


def folder_data(root: Path, **changes: Any) -> Data:
    fields = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    return load_data(f"imagefolder:{root}", val_fraction=0.25, options=LoadOptions(**{**fields, **changes}))


def test_images_that_are_enlarged_are_warned_about(root: Path) -> None:
    with pytest.warns(UserWarning, match=r"enlarged to 32 x 32 pixels.* has 16 x 12: a size of 16 would cost less"):
        folder_data(root, image_size=32)


def test_parts_of_an_image_folder(root: Path) -> None:
    data = folder_data(root)
    assert (data.classes, data.shape) == (2, (3, 8, 8))
    assert data.scored_on == "val/"  # held out to the end, but no test images
    assert [len(y) for _, y in pairs(data.train)] == [4, 4, 4]
    assert [len(y) for _, y in pairs(data.val)] == [5]
    assert [len(y) for _, y in pairs(data.test)] == [3, 4]
    assert [len(y) for _, y in pairs(data.whole)] == [4] * 5
    assert sum(int(y.sum()) for _, y in pairs(data.val)) == 2
    for x, y in pairs(data.test):
        brightest = x.mean((2, 3)).argmax(1)
        assert brightest.tolist() == y.tolist()
        assert x.shape[1:] == (3, 8, 8)
        assert x.dtype == torch.float32
    plain = {tuple(image.flatten().tolist()) for part in (data.train, data.val) for x, _ in pairs(part) for image in x}
    assert plain <= {tuple(image.flatten().tolist()) for x, _ in pairs(data.whole) for image in x}


def test_val_and_test_folders_are_taken_as_they_are(root: Path) -> None:
    write_images(root, "test", {"apple": 1, "pear": 1})
    data = folder_data(root)
    assert [len(y) for part in (data.train, data.val, data.test) for _, y in pairs(part)] == [4] * 5 + [3, 4] + [2]


def test_a_folder_of_training_images_alone(tmp_path: Path) -> None:
    write_images(tmp_path, "train", {"apple": 4, "pear": 4})
    assert folder_data(tmp_path).test is None


def test_grey_images(root: Path) -> None:
    x, _ = pairs(folder_data(root, channels=1).train)[0]
    assert x.shape == (4, 1, 8, 8)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_images_of_other_kinds_are_converted(tmp_path: Path, mode: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(4):
            image.new(mode, (9, 9)).save(tmp_path / "train" / name / f"{i}.png")
    assert pairs(folder_data(tmp_path).train)[0][0].shape == (4, 3, 8, 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmented_folders_repeat_resume_and_share(root: Path, workers: int) -> None:
    def source(rank: int = 0, world: int = 1, **more: Any) -> Source:
        options = LoadOptions(batch_size=4, image_size=8, cutout=3, **{"workers": workers, **more})
        return load_data(f"imagefolder:{root}", val_fraction=0.25, shard=(rank, world), options=options).train

    state = torch.get_rng_state()
    whole = pairs(source(), 1)
    assert torch.equal(state, torch.get_rng_state())
    assert len(whole) == len(source()) == 3
    assert same(whole, pairs(source(workers=0), 1))
    assert same(whole[1:], pairs(source(), 1, 1))
    assert pairs(source(), 1, 3) == []
    assert not same(whole, pairs(source(), 2))
    shares = [pairs(source(rank, 2), 1) for rank in range(2)]
    joined = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(*shares, strict=True)]
    assert same(whole, joined)
    last = pairs(source(channels_last=True), 1)
    assert same(whole, last)
    assert last[0][0].is_contiguous(memory_format=torch.channels_last)


def test_each_augmentation_can_be_turned_off(root: Path) -> None:
    def images(**options: Any) -> list[list[float]]:
        found = pairs(folder_data(root, **options).train, 1)
        return [image.flatten().tolist() for x, _ in found for image in x]

    plain = images()
    assert plain == images()
    mirrored = images(flip=True)
    kept = sum(a == b for a, b in zip(plain, mirrored, strict=True))
    turned = sum(
        torch.tensor(a).view(3, 8, 8).flip(2).flatten().tolist() == b for a, b in zip(plain, mirrored, strict=True)
    )
    assert 0 < kept < 12
    assert kept + turned == 12
    assert all(a != b for a, b in zip(plain, images(crop=1), strict=True))
    assert all(a != b for a, b in zip(plain, images(cutout=4), strict=True))


def test_very_long_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for name, size in (("a", (400, 2)), ("b", (1, 300))):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(4):
            image.new("RGB", size).save(tmp_path / "train" / name / f"{i}.png")
    for epoch in range(3):
        assert len(pairs(folder_data(tmp_path, crop=1, flip=True).train, epoch)) == 1


def test_empty_folders(tmp_path: Path) -> None:
    train = tmp_path / "train"
    assert message(lambda: folder_data(tmp_path)) == (
        f"{tmp_path} has no folder 'train': images are looked for in train/CLASS/ and val/CLASS/"
    )
    train.mkdir()
    assert message(lambda: folder_data(tmp_path)) == f"{train} is empty: one folder of images per class is needed"
    (train / "apple").mkdir()
    assert message(lambda: folder_data(tmp_path)) == (
        f"{train} has one class only, 'apple': at least two are needed to learn from"
    )
    write_images(tmp_path, "train", {"apple": 1})
    (train / "pear").mkdir()
    (train / "pear" / "notes.txt").write_text("no image")
    assert message(lambda: folder_data(tmp_path)) == (
        f"{train / 'pear'} holds no images: .bmp, .jpeg, .jpg, .png, .ppm, .webp are read"
    )


def test_a_class_that_training_does_not_know(root: Path) -> None:
    write_images(root, "val", {"quince": 1})
    assert message(lambda: folder_data(root)) == (
        f"{root / 'val'} has a class 'quince' that the training images do not have"
    )


def test_a_missing_class_in_the_test_set_keeps_the_numbers_of_the_others(tmp_path: Path) -> None:
    write_images(tmp_path, "train", {"apple": 4, "pear": 4})
    write_images(tmp_path, "val", {"pear": 2})
    assert [y.tolist() for _, y in pairs(folder_data(tmp_path).test)] == [[1, 1]]


def test_a_file_that_is_no_image_is_found_at_the_start(root: Path) -> None:
    path = root / "val" / "pear" / "1.png"
    path.write_text("no image")
    assert message(lambda: folder_data(root)) == (
        f"{path} is a broken image (UnidentifiedImageError): replace or remove it"
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_cut_short_is_named(root: Path, workers: int) -> None:
    path = root / "train" / "pear" / "2.JPG"
    path.write_bytes(path.read_bytes()[:-40])
    data = folder_data(root, workers=workers)
    assert message(lambda: pairs(data.whole)) == f"{path} is a broken image (OSError): replace or remove it"


def test_an_image_removed_after_the_start_is_named(root: Path) -> None:
    data = folder_data(root)
    path = root / "train" / "pear" / "2.JPG"
    path.unlink()
    assert message(lambda: pairs(data.whole)) == f"{path} is a broken image (FileNotFoundError): replace or remove it"


def test_deep_grey_values_are_not_cut_silently(root: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    path = root / "train" / "pear" / "deep.png"
    image.fromarray(np.full((9, 9), 40_000, dtype=np.uint16)).save(path)
    assert message(lambda: folder_data(root)) == (
        f"{path} has channels of kind 'I;16': convert it to 8-bit grey or colour"
    )


def test_image_folders_without_pillow(root: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert message(lambda: folder_data(root)) == "image folders are read with pillow: pip install pillow"


def test_a_folder_that_may_not_be_read(root: Path, monkeypatch: Any) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert message(lambda: folder_data(root)) == f"{root / 'train'} cannot be read: Permission denied"
