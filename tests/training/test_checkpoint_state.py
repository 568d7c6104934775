"""What a checkpoint holds: trees, optimizers and random states come back bit for bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcnet.errors import BcnetError
from bcnet.training.checkpoint import load, pack, save, unpack

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text() | st.integers(), JSON, max_size=4))
def test_pack_gives_back_every_tree(tree: dict[Any, Any]) -> None:
    tensors, state = pack(tree)
    found = unpack(tensors, json.loads(json.dumps(state)))
    assert found == tree
    assert repr(found) == repr(tree)


def test_pack_keeps_tensors_and_arrays_apart(tmp_path: Path) -> None:
    tree = {
        "a.b": torch.arange(2),
        "a": {"b": torch.arange(3), "c": np.arange(4, dtype=np.float32)},
        "$tensor": "x",
        "n": np.int64(7),
        "zero": np.array(1.5),
    }
    save(tmp_path, *pack(tree))
    found = unpack(*load(tmp_path))
    assert found["a.b"].tolist() == [0, 1]
    assert found["a"]["b"].tolist() == [0, 1, 2]
    assert isinstance(found["a"]["c"], np.ndarray)
    assert found["a"]["c"].tolist() == [0, 1, 2, 3]
    assert (found["$tensor"], found["n"], found["zero"].shape) == ("x", 7, ())


def test_pack_refuses_what_it_cannot_give_back() -> None:
    with pytest.raises(BcnetError) as error:
        pack({"run": {"when": time}})
    assert str(error.value) == "a checkpoint cannot hold run.when, a module"
    with pytest.raises(BcnetError) as error:
        pack({"run": {(1, 2): 3}})
    assert str(error.value) == "a checkpoint cannot hold the keys of run"


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        {},
        {"$tensor": "x"},
        {"$tensor": []},
        {"$array": {}},
        {"$odd": 1},
        {"$dict": 3},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$dict": [], "$tuple": []},
    ],
)
def test_unpack_of_a_hostile_tree(tree: Any) -> None:
    with pytest.raises(BcnetError) as error:
        unpack({}, {"tree": tree})
    assert str(error.value) == "this checkpoint's state was not written by this version of bcnet"


def optimizer_of(kind: str, net: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    if kind == "rmsprop":
        return torch.optim.RMSprop(net.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(net.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", ["sgd", "rmsprop", "adamw"])
@pytest.mark.parametrize("stop", [0, 3])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path, kind: str, stop: int) -> None:
    """Model, optimizer, schedule, torch's and numpy's random numbers: bit for bit."""

    def start() -> tuple[Any, ...]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Dropout(0.5), torch.nn.Flatten())
        optimizer = optimizer_of(kind, net)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return net, optimizer, schedule, np.random.default_rng(0), torch.Generator().manual_seed(1)

    def go(parts: tuple[Any, ...], steps: int) -> None:
        net, optimizer, schedule, rng, generator = parts
        for _ in range(steps):
            x = torch.randn(int(rng.integers(2, 5)), 2, 5, 5, generator=generator)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            schedule.step()

    def everything(parts: tuple[Any, ...]) -> dict[str, Any]:
        net, optimizer, schedule, rng, generator = parts
        return {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "random": {"paths": rng.bit_generator.state, "noise": generator.get_state(), "all": torch.get_rng_state()},
        }

    whole = start()
    go(whole, stop)
    save(tmp_path, *pack(everything(whole)))
    go(whole, 3)

    resumed = start()
    tree = unpack(*load(tmp_path))
    for part, name in zip(resumed, ("model", "optimizer", "schedule"), strict=False):
        part.load_state_dict(tree[name])
    resumed[3].bit_generator.state = tree["random"]["paths"]
    resumed[4].set_state(tree["random"]["noise"])
    torch.set_rng_state(tree["random"]["all"])
    go(resumed, 3)

    ours, theirs = pack(everything(resumed)), pack(everything(whole))
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])
