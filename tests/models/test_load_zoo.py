"""Networks of the zoo as they are loaded: the variables that tracing finds, and their costs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from bench_tables import RELEASED
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from traced import space_of

from bcnet import models as zoo
from bcnet.bench.spaces import get_space
from bcnet.errors import BcnetError
from bcnet.models.load import load_model
from bcnet.space.network import NetworkSpace


def traced(name: str, squeeze: bool = False) -> NetworkSpace:
    return space_of(load_model(f"zoo:{name}"), squeeze=squeeze)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_traced_variables_are_those_the_zoo_declares(name: str) -> None:
    space, model = traced(name), zoo.MODELS[name]
    declared = [(v.name, v.width) for v in model.order if not v.fixed]
    assert [(v.name, v.max) for v in space.variables] == declared
    assert [v.layers[0] for v in space.variables] == list(space.names)
    assert all(v.unit == 1 for v in space.variables)


def test_squeeze_widths_are_searched_where_asked() -> None:
    name = "efficientnet_b0_imagenet"
    kept = [v.name for v in zoo.MODELS[name].order if v.fixed]
    assert len(kept) == 16
    assert (len(traced(name)), len(traced(name, squeeze=True))) == (24, 40)
    assert {layer: reason for layer, reason in traced(name).fixed if layer in kept} == {
        layer: f"{layer} is ignored" for layer in kept
    }
    assert [(v.name, v.max) for v in traced(name, squeeze=True).variables] == [
        (v.name, v.width) for v in zoo.MODELS[name].order
    ]
    with pytest.raises(BcnetError) as caught:
        load_model("digits_cnn").space(squeeze=True)
    assert str(caught.value) == "zoo:digits_cnn keeps no squeeze widths that could be searched too"


def counted(name: str, widths: list[int]) -> tuple[int, int]:
    """FLOPs by torch's own counter (two per multiply-accumulate) and parameters of the zoo's network."""
    with torch.device("meta"):
        network, x = zoo.build(name, widths).eval(), torch.empty(1, *zoo.MODELS[name].input_shape)
    with FlopCounterMode(display=False) as counter:
        network(x)
    return counter.get_total_flops() // 2, sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(("name", "squeeze"), [*((n, False) for n in zoo.MODELS), ("efficientnet_b0_imagenet", True)])
def test_costs_equal_torchs_count_of_networks_the_zoo_builds(name: str, squeeze: bool) -> None:
    space = traced(name, squeeze)
    rng = np.random.default_rng(len(name))
    some = [space.sample(rng)[0], rng.integers(1, space.max)]
    found = zip(space.costs["flops"](some).tolist(), space.costs["params"](some).tolist(), strict=True)
    assert list(found) == [counted(name, widths.tolist()) for widths in some]


@pytest.mark.parametrize("kind", ["mobilenet", "resnet"])
def test_costs_equal_the_formulas_of_channel_bench(kind: str) -> None:
    bench = get_space(kind)
    every = bench.all_widths()
    space = traced(f"channel_bench_{kind}")
    assert len(every) == 4**7
    for name in ("flops", "params"):
        np.testing.assert_array_equal(space.costs[name](every), bench.costs[name](every))


@pytest.mark.parametrize(("kind", "file"), [("mobilenet", "Results_MobileNet"), ("resnet", "Results_ResNet")])
def test_costs_equal_the_tables_of_channel_bench(kind: str, file: str) -> None:
    path = RELEASED / f"{file}.json"
    if not path.exists():
        pytest.skip(f"no {path.name}: the released tables are not part of the repository")
    entries = json.loads(path.read_text())
    space = traced(f"channel_bench_{kind}")
    widths = np.array([[int(digit) for digit in key] for key in entries]) * space.max // 4
    assert len(widths) == 4**7
    for name in ("flops", "params"):
        np.testing.assert_array_equal(space.costs[name](widths), [entry[name] for entry in entries.values()])


def test_networks_of_a_zoo_space_are_the_zoos() -> None:
    space = traced("digits_cnn")
    widths = [5, 7, 11, 13, 40]
    built, own = space.build(widths), zoo.build("digits_cnn", widths)
    assert {k: v.shape for k, v in built.state_dict().items()} == {k: v.shape for k, v in own.state_dict().items()}


@pytest.mark.parametrize("name", ["channel_bench_mobilenet", "channel_bench_resnet", "vgg19_cifar"])
def test_zoo_networks_draw_their_weights_as_torch_does(name: str) -> None:
    """As those behind the Channel-Bench tables did: uniform, with a variance of 1 / (3 fan-in)."""
    for network in (zoo.build(name), traced(name).build(traced(name).max)):
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d):
                fan_in = layer.weight[0].numel()
                assert layer.weight.abs().max() <= fan_in**-0.5
                assert layer.weight.std().item() == pytest.approx((3 * fan_in) ** -0.5, rel=0.05)


def test_a_zoo_network_knows_itself() -> None:
    loaded = load_model("digits_cnn")
    assert (loaded.spec, loaded.input_shape, loaded.classes) == ("zoo:digits_cnn", (1, 8, 8), 10)
    assert loaded.example.shape == (1, 1, 8, 8)
    assert loaded.example.std() > 0.5
    wide = load_model("zoo:digits_cnn", (1, 16, 16), classes=3)
    assert wide.model(wide.example.expand(2, -1, -1, -1)).shape == (2, 3)
    assert (wide.input_shape, wide.classes) == ((1, 16, 16), 3)


def test_options_reach_the_space() -> None:
    space = load_model("digits_cnn").space(groups=4, base=2, round_to=8, ignore=["stem.conv", "block1.*"])
    assert [(v.name, v.candidates) for v in space.variables] == [
        ("block2.body.expand.conv", (64, 96, 128)),
        ("block2.body.project.conv", (32, 48, 64)),
        ("head.conv", (64, 96, 128)),
    ]
