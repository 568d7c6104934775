"""Weights from files: found wherever they lie, loaded as a whole or not at all, and never executed."""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.models import weights
from bcnet.models.weights import load_weights

StateDict = dict[str, Tensor]


def network(classes: int = 5, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, classes))


TRAINED = network(seed=1).state_dict()
OTHER = network(seed=2).state_dict()


def same(net: nn.Module, state: StateDict) -> bool:
    return all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def prefixed(prefix: str, state: StateDict = TRAINED) -> StateDict:
    return {f"{prefix}{name}": value for name, value in state.items()}


@pytest.mark.parametrize("name", ["net.safetensors", "renamed.pt"])
def test_safetensors_under_any_name(tmp_path: Path, name: str) -> None:
    save_file(TRAINED, tmp_path / name)
    net = network()
    load_weights(net, str(tmp_path / name))
    assert same(net, TRAINED)


HELD: dict[str, Any] = {
    "plain": TRAINED,
    "state_dict": {"epoch": 3, "state_dict": TRAINED, "optimizer": {"state": {0: {"momentum": torch.ones(3)}}}},
    "model": {"model": TRAINED, "lr": 0.1},
    "model_state_dict": {"model_state_dict": TRAINED},
    "net": {"net": TRAINED, "acc": 93.2},
    "an average beside the weights": {"state_dict_ema": OTHER, "state_dict": TRAINED},
    "an average alone": {"ema": TRAINED},
    "deep": {"checkpoint": {"trainer": {"net": TRAINED}}},
    "data parallel": {"state_dict": prefixed("module.")},
    "compiled": prefixed("_orig_mod."),
    "compiled in parallel": prefixed("module._orig_mod."),
    "compiled inside": {n.replace("0.", "0._orig_mod.", 1): v for n, v in TRAINED.items()},
    "a trainer's": {"state_dict": prefixed("model.") | {"criterion.weight": torch.ones(5)}},
    "half precision": {name: v.half() if v.is_floating_point() else v for name, v in TRAINED.items()},
    "without a counter": {name: v for name, v in TRAINED.items() if "num_batches" not in name},
    "parameters": {name: nn.Parameter(v) if v.is_floating_point() else v for name, v in TRAINED.items()},
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("case", HELD)
def test_a_state_dict_is_found(tmp_path: Path, case: str, legacy: bool) -> None:
    file = tmp_path / "checkpoint.pth"
    torch.save(HELD[case], file, _use_new_zipfile_serialization=not legacy)
    net = network()
    load_weights(net, file)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, TRAINED[name], rtol=1e-3, atol=1e-3)
    assert all(v.dtype == TRAINED[name].dtype for name, v in net.state_dict().items())


def test_a_network_with_such_names_of_its_own(tmp_path: Path) -> None:
    inner = nn.ModuleDict({"model": network(seed=1), "net": nn.Linear(2, 2)})
    torch.save(inner.state_dict(), tmp_path / "w.pt")
    net = nn.ModuleDict({"model": network(), "net": nn.Linear(2, 2)})
    load_weights(net, tmp_path / "w.pt")
    assert same(net, inner.state_dict())


class Bomb:
    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.place}",)


def half_of(state: StateDict) -> StateDict:
    return dict(list(state.items())[: len(state) // 2])


def spoilt(value: float) -> StateDict:
    state = copy.deepcopy(TRAINED)
    state["3.bias"][1] = value
    return state


def saved(held: Any) -> Callable[[Path], None]:
    return lambda file: torch.save(held, file)


def raw(data: bytes) -> Callable[[Path], None]:
    return lambda file: (file.write_bytes(data), None)[1]


def cut_short(file: Path) -> None:
    torch.save(TRAINED, file)
    file.write_bytes(file.read_bytes()[:400])


NEITHER = "{file} is damaged, or neither a safetensors file nor a checkpoint that torch.save wrote"
CODE = "{{file}} holds Python objects ({}), which are not loaded since that runs code: save the state_dict"
FIT = "{{file}} does not fit Sequential: {}; give the weights of this very network"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "of another network": (
        saved(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 5)).state_dict()),
        FIT.format(
            "6 of 9 tensors are missing (1.weight, 1.bias, 1.running_mean, …), 2 are unexpected (2.weight, 2.bias), "
            "2 have another shape (0.weight is (3, 2), not (4, 3, 3, 3), 0.bias is (3,), not (4,))"
        ),
    ),
    "with half of its keys": (
        saved({"state_dict": half_of(TRAINED)}),
        FIT.format("4 of 9 tensors are missing (1.running_mean, 1.running_var, 3.weight, …)"),
    ),
    "with other classes": (
        saved(network(7).state_dict()),
        FIT.format("2 have another shape (3.weight is (7, 4), not (5, 4), 3.bias is (7,), not (5,))"),
    ),
    "with more than it needs": (
        saved(TRAINED | {"4.weight": torch.ones(2)}),
        FIT.format("1 is unexpected (4.weight)"),
    ),
    "of whole numbers": (
        saved(TRAINED | {"3.bias": torch.ones(5, dtype=torch.int64)}),
        FIT.format("1 has another shape (3.bias is (5,) of int64, not (5,))"),
    ),
    "with NaN": (
        saved(spoilt(float("nan"))),
        "{file} holds numbers that are not finite in 3.bias: take an earlier checkpoint",
    ),
    "with inf": (
        saved({"model": spoilt(float("inf"))}),
        "{file} holds numbers that are not finite in 3.bias: take an earlier checkpoint",
    ),
    "without weights": (
        saved({"epoch": 3, "losses": [1.0, 2.0]}),
        "{file} holds no weights: it must hold the state_dict of the network",
    ),
    "of a list": (saved([1, 2]), "{file} holds no weights: it must hold the state_dict of the network"),
    "empty": (raw(b""), "{file} is empty: it holds no weights"),
    "of noise": (raw(bytes(range(256)) * 8), NEITHER),
    "of a text": (raw(b"weights: none\n"), NEITHER),
    "cut short": (cut_short, NEITHER),
    "of a lying header": (raw((10**18).to_bytes(8, "little") + b'{"a":1}'), NEITHER),
    "a folder": (lambda file: file.mkdir(), "{file} is a folder: name the .safetensors or .pt file in it"),
    "not there": (lambda file: None, "there is no file {file}"),
    "a pipe": (os.mkfifo, "{file} is not a regular file, so it is not read"),
    "a whole network": (saved(network()), CODE.format("torch.nn.modules.container.Sequential")),
    "arguments": (saved({"args": argparse.Namespace(lr=1), "model": TRAINED}), CODE.format("argparse.Namespace")),
}


@pytest.mark.parametrize("case", BAD)
def test_one_sentence_and_nothing_changed(tmp_path: Path, case: str) -> None:
    make, sentence = BAD[case]
    file = tmp_path / "w.pt"
    make(file)
    net = network()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(BcnetError) as raised:
        load_weights(net, file)
    assert str(raised.value) == sentence.format(file=file)
    assert same(net, before)


@pytest.mark.parametrize("how", ["torch", "torch inside", "legacy", "pickle", "old pickle"])
def test_nothing_is_executed(tmp_path: Path, how: str) -> None:
    file, trace = tmp_path / "w.pt", tmp_path / "executed"
    bomb = Bomb(trace)
    if "pickle" in how:
        file.write_bytes(pickle.dumps(bomb, protocol=2 if how == "old pickle" else 4))
    else:
        torch.save(
            {**TRAINED, "more": bomb} if "inside" in how else bomb, file, _use_new_zipfile_serialization=how != "legacy"
        )
    with pytest.raises(BcnetError) as raised:
        load_weights(network(), file)
    assert not trace.exists()
    refused = CODE.format("posix.system").format(file=file)
    assert str(raised.value) in (refused, NEITHER.format(file=file))
    if how.startswith("torch"):
        assert str(raised.value) == refused


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "w.pt"
    torch.save(TRAINED, file)
    size = file.stat().st_size
    monkeypatch.setattr(weights, "MOST_BYTES", size - 1)
    with pytest.raises(BcnetError) as raised:
        load_weights(network(), file)
    assert str(raised.value) == f"{file} has {size} bytes, but a file of weights may have at most {size - 1}"


def test_what_it_unpacks_to_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "w.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("archive/data.pkl", b"\0" * 100_000)
    monkeypatch.setattr(weights, "MOST_BYTES", 50_000)
    with pytest.raises(BcnetError) as raised:
        load_weights(network(), file)
    assert str(raised.value) == f"{file} unpacks to 100000 bytes, but a file of weights may have at most 50000"
