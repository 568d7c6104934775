"""Which channels share a width, found from the graph of tiny networks; and what cannot be coupled, in one sentence."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tiny_networks import NETWORKS, Tiny, X, conv, tiny, traced
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bcnet.space
from bcnet.errors import BcnetError
from bcnet.space.network import NetworkSpace, trace

# (variable, full width, unit) as a person finds them in the network's code.
EXPECTED = {
    "Residual": [("stem.0", 12, 1), ("inner.0", 10, 1)],
    "SqueezeExcite": [("stem.0", 12, 1), ("reduce", 4, 1)],
    "ChannelAttention": [("stem.0", 12, 1)],
    "Dense": [("stem.0", 12, 1), ("first.0", 6, 1), ("second.0", 6, 1)],
    "Shuffle": [("stem.0", 6, 1)],
    "WideGroups": [("stem.0", 8, 1), ("grouped.0", 16, 2)],
    "NarrowGroups": [("stem.0", 16, 2)],
    "Depthwise": [("stem.0", 12, 1)],
    "LayerScale": [("stem.0", 12, 1), ("expand", 20, 1)],
    "SharedWeights": [("stem.0", 12, 1), ("left", 8, 1), ("out", 12, 1)],
    "Transposed": [("stem.0", 12, 1), ("up", 8, 1), ("out", 10, 1)],
    "PixelShuffle": [("stem.0", 12, 1), ("up", 5, 1), ("out", 6, 1)],
    "GroupNormed": [("stem.0", 12, 2), ("wide", 20, 2), ("out", 12, 1)],
    "GroupDeviation": [("stem.0", 12, 3), ("wide", 12, 2), ("out", 12, 1)],
    "MergedBatch": [("stem.0", 12, 1)],
    "Flattened": [("features.0", 8, 1), ("features.2", 10, 1), ("classifier.1", 16, 1)],
    "Gated": [("stem.0", 12, 1), ("wide", 8, 1), ("wider", 10, 1), ("out", 12, 1)],
    "Standardized": [("stem.0", 12, 1), ("second", 12, 1), ("second#2", 10, 1)],
    "PaddedShortcut": [("stem.0", 8, 1), ("wide.0", 6, 1)],
    "Res2Net": [("stem.0", 4, 1), ("parts.1.0", 4, 1), ("out.0", 12, 1)],
    "UnequalSplit": [("stem.0", 8, 1), ("stem.0#2", 4, 1), ("large.0", 8, 1), ("small.0", 4, 1)],
    "Remembered": [("stem.0", 3, 1), ("stem.0#2", 9, 1), ("partial.0", 3, 1)],
    "UnequalChunks": [
        ("stem.0", 5, 1),
        ("stem.0#2", 5, 1),
        ("stem.0#3", 4, 1),
        ("parts.0.0", 5, 1),
        ("parts.1.0", 5, 1),
        ("parts.2.0", 4, 1),
    ],
    "BlurPool": [("stem.0", 12, 1), ("out.0", 12, 1)],
    "Attention": [("stem.0", 12, 1), ("qkv", 16, 2)],
    "Auxiliary": [("stem.0", 12, 1), ("more.0", 10, 1), ("aux.0", 6, 1)],
}


def three_widths(space: NetworkSpace) -> list[np.ndarray]:
    return [space.min, space.sample(np.random.default_rng(0))[0], space.max]


@pytest.mark.parametrize("name", NETWORKS)
def test_variables(name: str) -> None:
    assert [(v.name, v.max, v.unit) for v in traced(name)[1].variables] == EXPECTED[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_only_outputs_are_fixed(name: str) -> None:
    assert {why for _, why in traced(name)[1].fixed} == {"it is the network's output"}


@pytest.mark.filterwarnings("ignore:UnequalChunks itself does not run")
@pytest.mark.parametrize("name", NETWORKS)
def test_costs_are_what_torch_counts(name: str) -> None:
    space = traced(name)[1]
    for widths in three_widths(space):
        network = space.build(widths).eval()
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            network(X[:1])
        assert space.costs["flops"](widths)[0] == counter.get_total_flops() // 2
        assert space.costs["params"](widths)[0] == sum(p.numel() for p in network.parameters())


class AcrossImages(Tiny):
    """The images of a batch attend to each other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mean((2, 3))
        return self.head((x @ x.T).softmax(1) @ x)


def test_flops_are_those_of_one_image_where_images_meet() -> None:
    space = trace(AcrossImages().double(), X)
    network = space.build(space.min)
    with FlopCounterMode(display=False) as counter:
        network.eval()(X[:1])
    assert space.costs["flops"](space.min)[0] == counter.get_total_flops() // 2


def test_memory_falls_with_widths() -> None:
    for name in NETWORKS:
        space = traced(name)[1]
        smallest, some, largest = space.costs["memory"](np.stack(three_widths(space)))
        assert 0 < smallest <= some <= largest


def test_memory_of_a_chain_is_its_largest_pair_of_maps() -> None:
    """Convolution 1 reads 3 channels and writes 4, convolution 2 reads 4 and writes 2, of 64 doubles each."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    memory = trace(model, X).costs["memory"]
    assert memory([[4], [3], [1]]).tolist() == [(3 + 4) * 64 * 8, (3 + 3) * 64 * 8, (3 + 1) * 64 * 8]


def test_a_batch_of_one_is_as_good_as_two() -> None:
    one, two = trace(tiny("Residual"), X[:1]), trace(tiny("Residual"), X)
    assert one == two
    assert one.costs["flops"](one.max) == two.costs["flops"](two.max)


def test_candidates_are_rounded_as_far_as_a_layer_allows() -> None:
    space = trace(tiny("Residual"), X, round_to=4)
    assert [v.candidates for v in space.variables] == [(4, 8, 12), (2, 4, 6, 8, 10)]
    assert space.scaled(0.7).tolist() == [8, 6]
    assert space.scaled(0.01).tolist() == [4, 2]
    assert space.uniform(lambda widths: widths.sum(axis=1), 15).tolist() == [8, 6]


@pytest.mark.parametrize(
    ("ignore", "left"), [(["inner.0"], ["stem.0"]), (["inner*"], ["stem.0"]), (["outer.0"], ["inner.0"])]
)
def test_ignored_layers_keep_their_width(ignore: list[str], left: list[str]) -> None:
    space = trace(tiny("Residual"), X, ignore=ignore)
    assert list(space.names) == left
    assert any(why.endswith("is ignored") for _, why in space.fixed)
    assert space.build(space.min)(X).shape == (2, 5)


def test_ignoring_an_unknown_layer() -> None:
    with pytest.raises(BcnetError, match=r"^ignore names 'inner1', but no layer of the network is called so$"):
        trace(tiny("Residual"), X, ignore=["inner1"])


class Custom(Tiny):
    """A network with an operator that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
        self.out = conv(12, 12)

    def body(self, x: Tensor) -> Tensor:
        return self.out(torch.ops.bcnet_tests.gate(x, self.scale))


@torch.library.custom_op("bcnet_tests::gate", mutates_args=())
def gate(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale[:, None, None].sigmoid()


@gate.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_unknown_operator_keeps_its_channels_until_it_is_taught() -> None:
    model = Custom().double().eval()
    sentence = (
        r"^bcnet does not know the operator bcnet_tests::gate \(in gate\) and keeps the channels that meet it at their "
        r'full width; if it keeps channels apart, teach it with bcnet.space.register\("bcnet_tests::gate", '
        r'couple=lambda call: call.carry\(call.value\("x"\)\)\)$'
    )
    with pytest.warns(UserWarning, match=sentence.replace(r"\(in gate\)", r"\(in \w*\)")):
        space = trace(model, X)
    assert space.names == ("out.0",)
    assert ("stem.0", "gate: operator bcnet_tests::gate is unknown to bcnet") in space.fixed

    @bcnet.space.rule("bcnet_tests::gate")
    def rule(call: bcnet.space.Call) -> bcnet.space.Value:
        call.agree(call.value("x"), 1, call.value("scale"), 0)
        return call.value("x")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            space = trace(model, X)
    finally:
        del bcnet.space.OPERATORS["bcnet_tests::gate"]
    assert space.names == ("stem.0", "out.0")
    assert space.build(space.min)(X).shape == (2, 5)
    bcnet.space.register("bcnet_tests::gate", couple=lambda call: call.carry(call.value("x")))
    try:
        assert ("scale", "gate: the operator's rule says nothing of it") in trace(model, X, check=False).fixed
    finally:
        del bcnet.space.OPERATORS["bcnet_tests::gate"]
    assert torch.equal(space.build(space.max, weights_of=model).eval()(X), model(X))


class Branching(Tiny):
    def body(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class OtherDevice(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.to("meta")


class FixedPicks(Tiny):
    """Channels picked by number cannot move."""

    def body(self, x: Tensor) -> Tensor:
        return x * x[:, 3:4]


class Scalars(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


BAD = {
    "data-dependent": (
        lambda: Branching().double(),
        X,
        "torch.export cannot capture Branching: its forward branches on the values of tensors (test_coupling.py, line "
        f"{Branching.body.__code__.co_firstlineno + 1}: return x if x.sum() > 0 else -x), which has no fixed graph; "
        "rewrite that branch with torch.where or torch.cond, or trace a module that wraps the network and leaves that "
        "part out, or switch it off where there is an option",
    ),
    "nothing to vary": (
        Scalars,
        X,
        "this network has no channel dimension that could vary: it has no layers with weights",
    ),
    "another device": (
        OtherDevice,
        X,
        "the model is on meta but the example input on cpu: move both to one device",
    ),
    "wrong channels": (
        lambda: tiny("Residual"),
        torch.zeros(2, 4, 8, 8, dtype=torch.float64),
        "Residual does not run on an example input of shape (2, 4, 8, 8): Given groups=1, weight of size "
        "[12, 3, 3, 3], expected input[2, 4, 8, 8] to have 3 channels, but got 4 channels instead; give it an input "
        "that it takes",
    ),
    "no tensor": (
        lambda: tiny("Residual"),
        (3, 8, 8),
        "the example input must be a batch as a tensor, or a tuple or dictionary with such tensors",
    ),
    "no module": (
        lambda: "resnet18",
        X,
        "expected a torch.nn.Module, but got str",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_traced_says_why(case: str) -> None:
    make, example, sentence = BAD[case]
    with pytest.raises(BcnetError) as caught:
        trace(make(), example)
    assert str(caught.value) == sentence


def test_a_channel_picked_by_number_is_fixed() -> None:
    """Those before and behind it vary."""
    space = trace(FixedPicks().double(), X)
    assert [v.candidates[-1] for v in space.variables] == [3, 8]
    assert space.fixed[0] == ("stem.0", "slice_2: it picks single channels by number")
