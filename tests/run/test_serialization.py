"""Networks on disk: saved and loaded in one call each, and what is said of files that were changed."""

from __future__ import annotations

import copy
import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import nn

import bcnet.run.serialization
from bcnet.errors import BcnetError
from bcnet.models.load import load_model
from bcnet.run.serialization import Description, load, save
from bcnet.space.network import trace


class Own(nn.Module):
    """A network of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.last((x + self.second(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A saved network of a class of one's own: (folder, network, description)."""
    space = trace(Own(), torch.randn(1, 3, 8, 8), groups=4)
    network = space.build([6]).eval()
    scale = {"mean": (1.0,) * 3, "std": (2.0,) * 3}
    found = Description({space.names[0]: 6}, ((3, 8, 8),), classes=4, normalisation=scale)
    return save(tmp_path_factory.mktemp("own"), network, found), network, found


@pytest.fixture
def copied(own, tmp_path):
    for path in own[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(folder, **changes):
    """Change the description and put its digest right, as a stranger can."""
    path = folder / "widths.json"
    content = {**json.loads(path.read_text()), **changes}
    del content["sha256"]
    path.write_text(json.dumps({**content, "sha256": bcnet.run.serialization.digest_of(content)}))


def test_network_of_the_zoo_comes_back_from_its_name(tmp_path):
    original = load_model("zoo:digits_cnn")
    space = original.space()
    widths = [(low + high) // 2 for low, high in zip(space.min, space.max, strict=True)]
    network = space.build(widths).eval()
    named = dict(zip(space.names, map(int, widths), strict=True))
    save(tmp_path, network, Description(named, (original.input_shape,), original.spec, original.classes))
    loaded = load(tmp_path)
    assert not loaded.training
    x = torch.randn(3, *original.input_shape)
    assert torch.equal(loaded(x), network(x))
    assert type(loaded) is type(original.model)


@pytest.mark.parametrize("model", [Own, Own()], ids=["class", "network"])
def test_own_class_comes_back_when_given(own, model):
    folder, network, _ = own
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(load(folder, model=model)(x), network(x))


def test_description_survives(own):
    folder, _, description = own
    assert bcnet.run.serialization.describe(folder) == description


def test_widths_beyond_the_original_are_loaded(tmp_path):
    space = trace(Own(), torch.randn(1, 3, 8, 8))
    network = space.build([12], grow=True).eval()
    save(tmp_path, network, Description({space.names[0]: 12}, ((3, 8, 8),)))
    assert load(tmp_path, model=Own).first.out_channels == 12


def test_own_class_must_be_given(own):
    with pytest.raises(BcnetError) as error:
        load(own[0])
    assert str(error.value) == (
        f"the network in {own[0]} was made from a class of your own: pass it, as in bcnet.load(folder, model=MyNetwork)"
    )


def test_python_file_named_by_a_description_is_not_run(copied):
    trap = copied / "trap.py"
    trap.write_text("raise SystemExit('the trap was run')")
    edit(copied, source=f"{trap}:Own")
    with pytest.raises(BcnetError, match="was made from a class of your own"):
        load(copied)


def test_another_network_is_refused(own):
    with pytest.raises(BcnetError, match="is of another network: its width variables are first, those of the given"):
        load(own[0], model=lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)))


def test_model_must_return_a_network(own):
    with pytest.raises(BcnetError) as error:
        load(own[0], model=lambda: 3)
    assert str(error.value) == "model must be or return a torch.nn.Module, not int"


def test_missing_folder(tmp_path):
    with pytest.raises(BcnetError) as error:
        load(tmp_path / "nowhere")
    assert str(error.value) == (
        f"there is no saved network in {tmp_path / 'nowhere'} (widths.json: No such file or directory)"
    )


def test_missing_weights(copied):
    (copied / "weights.safetensors").unlink()
    with pytest.raises(BcnetError) as error:
        load(copied, model=Own)
    assert str(error.value) == f"cannot read {copied / 'weights.safetensors'}: No such file or directory"


def test_truncated_weights(copied):
    path = copied / "weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(BcnetError) as error:
        load(copied, model=Own)
    assert str(error.value) == (
        f"{path} was damaged or exchanged after it was saved "
        f"(it has {len(whole) - 10} bytes rather than {len(whole)}): export the network again"
    )


def test_changed_weights(copied):
    path = copied / "weights.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(BcnetError, match=r"was damaged or exchanged after it was saved \(its checksum differs\)"):
        load(copied, model=Own)


def test_truncated_description(copied):
    path = copied / "widths.json"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(BcnetError) as error:
        load(copied, model=Own)
    assert str(error.value) == f"{path} is not JSON, perhaps cut short: export the network again"


def test_a_description_that_was_changed(copied):
    path = copied / "widths.json"
    path.write_text(path.read_text().replace("2.0", "2.5"))
    with pytest.raises(BcnetError) as error:
        load(copied, model=Own)
    assert str(error.value) == f"{path} was changed after it was saved: export the network again"


def test_edited_width(copied):
    edit(copied, widths={"first": 5})
    with pytest.raises(BcnetError, match=r"does not fit its network: 'first.weight' is \(6, 3, 3, 3\) in the file"):
        load(copied, model=Own)


def test_a_huge_width_is_refused_before_it_is_built(copied):
    edit(copied, widths={"first": 2**20})
    with pytest.raises(BcnetError, match=r"do not belong together: widths.json asks for 9,895,641,350,148 parameters"):
        load(copied, model=Own)


@pytest.mark.parametrize("spec", ["timm:resnet10t", "torchvision:shufflenet_v2_x0_5"])
@pytest.mark.filterwarnings("ignore")
def test_networks_of_other_packages_come_back_from_their_name(spec, tmp_path):
    try:
        original = load_model(spec, (3, 64, 64), 7)
    except BcnetError as error:
        pytest.skip(str(error))
    space = original.space()
    network = space.build(space.min).eval()
    widths = dict(zip(space.names, map(int, space.min), strict=True))
    save(tmp_path, network, Description(widths, (original.input_shape,), spec, 7))
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(load(tmp_path)(x), network(x))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 9, "has format version 9, but this bcnet reads 2"),
        ("format", "other", "describes no network of bcnet: give the folder of an export"),
        ("widths", {"first": "6"}, "must be a map of width variables to whole numbers"),
        ("widths", {"first": 10**9}, "must be a map of width variables to whole numbers"),
        ("inputs", [[3, 10**6, 10**6]], "must be a list of shapes, at most 2^26 values each"),
        ("source", 5, "must be a text or null"),
        ("classes", True, "must be a whole number or null"),
        ("ignore", "first", "must be a list of texts"),
        ("squeeze", 1, "must be true or false"),
        ("normalisation", {"mean": [0]}, "must be null, or mean and std as lists of numbers"),
    ],
)
def test_edited_description(copied, key, value, message):
    edit(copied, **{key: value})
    with pytest.raises(BcnetError) as error:
        load(copied, model=Own)
    assert message in str(error.value)


def test_nothing_is_written_where_nothing_can_be(own, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BcnetError, match="cannot write the network in "):
        save(tmp_path / "file", own[1], own[2])


def resaved(folder, change):
    """Change the weights and put a right checksum over them, as a stranger can."""
    path = folder / "weights.safetensors"
    data = write_tensors(change(read_tensors(path.read_bytes())))
    path.write_bytes(data)
    edit(folder, weights={"file": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {**t, "last.bias": t["last.bias"].double()},
            "does not fit its network: 'last.bias' is of float64 in the file, but of float32 in the network",
        ),
        (
            lambda t: {**t, "last.bias": t["last.bias"] * float("nan")},
            "holds weights that are infinite or NaN: 'last.bias' has some",
        ),
        (
            lambda t: {**t, "more": torch.ones(1)},
            "does not fit its network: 'more' is missing in the network",
        ),
    ],
)
def test_other_weights_with_a_right_checksum(copied, change, message):
    resaved(copied, change)
    with pytest.raises(BcnetError) as error:
        load(copied, model=Own)
    assert str(error.value) == f"{copied / 'weights.safetensors'} {message}"


def test_a_network_with_weights_that_are_no_numbers_is_not_saved(own, tmp_path):
    network = copy.deepcopy(own[1])
    network.norm.running_mean[2] = float("inf")
    with pytest.raises(BcnetError) as error:
        save(tmp_path, network, own[2])
    assert str(error.value) == (
        "the network cannot be saved: 'norm.running_mean' holds values that are infinite or NaN"
    )


def test_a_large_input_is_refused_before_it_is_made(copied):
    edit(copied, inputs=[[3, 4096, 4096]])
    with pytest.raises(BcnetError) as error:
        load(copied, model=Own)
    assert str(error.value) == (
        f"the network in {copied} takes inputs of 50,331,648 values, for which much memory may be needed: "
        "pass most_input=50331648 if you trust the file"
    )


@pytest.mark.parametrize("name", ["widths.json", "weights.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(copied, name, kind):
    path = copied / name
    path.unlink()
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    with pytest.raises(BcnetError, match=r"Not a regular file|Is a directory"):
        load(copied, model=Own)


def test_loading_draws_no_random_numbers(own):
    model = Own()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(own[0], model=model)
    assert torch.equal(torch.rand(3), expected)
