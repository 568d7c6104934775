"""Networks with parts that are seldom seen: traced, counted, built, sliced and run as supernets all the same."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from held import (
    assert_counts,
    assert_full_width_is_the_original,
    assert_paths_are_builds,
    assert_slices_are_zeros,
    assert_weights_are_drawn,
    some_widths,
    tensors,
)
from odd_networks import ODD, Answering, Dictionary, Features, TwoInputs
from tiny_networks import Tiny, X
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.space import torch_export
from bcnet.space.network import NetworkSpace, trace
from bcnet.supernet.supernet import Supernet

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*itself does not run at other widths"),
]
MASK = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

# (variable, full width, unit), and the layers that keep their width with the reason; the head, an output, is left out.
OUTPUT = ("head", "it is the network's output")
EXPECTED = {
    "Constants": ([("stem.0", 12, 1), ("inner.0", 10, 1), ("outer.0", 12, 1)], []),
    "WeightNorm": ([("stem.0", 12, 1), ("old", 10, 1), ("new", 12, 1)], []),
    "SpectralNorm": ([("stem.0", 12, 1), ("old", 10, 1), ("new", 12, 1)], []),
    "Squeezed": ([("stem.0", 12, 1)], []),
    "DeadEnds": ([("stem.0", 12, 1), ("inner.0", 12, 1)], [("nowhere", "nothing reads its output")]),
    "Slices": ([("stem.0", 12, 1), ("layers.1.0", 10, 1), ("layers.3.0", 12, 1)], []),
    "FixedGroups": ([("grouped", 16, 2)], []),
    "Picked": (
        [("stem.0", 12, 1), ("inner.0", 10, 1), ("outer.0", 12, 1)],
        [],
    ),
    "LocalResponse": ([("stem.0", 12, 1), ("inner.0", 10, 1), ("outer.0", 12, 1)], []),
    "DynamicConv": (
        [("stem.0", 12, 1), ("kernels", 10, 1)],
        [(name, "the cost of einsum_default would be no quadratic form") for name in ("mixture", "kernels")],
    ),
    "Memory": ([("stem.0", 12, 1), ("cell.0", 12, 1)], []),
    "Einsum": ([("stem.0", 12, 1), ("mix", 10, 1), ("out.0", 12, 1)], []),
    "Recurrent": ([("stem.0", 12, 1), ("inner.0", 10, 1), ("gru", 6, 1), ("lstm", 9, 1)], []),
    "RecurrentCells": ([("stem.0", 12, 1), ("long", 10, 1), ("short", 6, 1)], []),
    "BiasedAttention": ([("stem.0", 12, 1), ("qkv", 4, 1), ("out", 12, 1)], []),
    "NumbersInBuffers": ([("stem.0", 12, 1), ("inner", 12, 1)], []),
    "ShuffleLayer": ([("stem.0", 6, 3), ("grouped.0", 18, 3)], []),
    "Frozen": ([("stem.0", 12, 1)], []),
    "NoGradient": ([("stem.0", 12, 1)], []),
    "NamedCode": ([("stem.0", 12, 1), ("code.0", 12, 1)], []),
    "NamedState": ([("stem.0", 12, 1), ("state.0", 10, 1), ("space.0", 12, 1)], []),
    "TwoInputs": ([("stem.0", 12, 1)], []),
    "Dictionary": ([("stem.0", 12, 1)], []),
    "Answering": ([("stem.0", 12, 1)], []),
}
# Norms of whole weights see how many channels there are.
NOT_ZEROS = {"WeightNorm", "SpectralNorm"}


@cache
def traced(name: str) -> tuple[nn.Module, NetworkSpace]:
    torch.manual_seed(0)
    model = ODD[name]().double().eval()
    return model, trace(model, (X, MASK) if name == "TwoInputs" else X)


@pytest.mark.parametrize("name", ODD)
def test_variables_and_what_is_fixed(name: str) -> None:
    space = traced(name)[1]
    variables, fixed = EXPECTED[name]
    assert [(v.name, v.max, v.unit) for v in space.variables] == variables
    assert [row for row in space.fixed if row != OUTPUT] == fixed
    assert space.graph.dynamic


@pytest.mark.parametrize("name", ODD)
def test_counts_are_those_of_torch(name: str) -> None:
    space = traced(name)[1]
    assert_counts(space, [w.clip(2) for w in some_widths(space)])  # an einsum over one channel is no product to torch


@pytest.mark.parametrize("name", ODD)
def test_fresh_weights_are_drawn(name: str) -> None:
    space = traced(name)[1]
    assert_weights_are_drawn(space, some_widths(space)[1])


@pytest.mark.parametrize("name", ODD)
def test_full_width_is_the_original(name: str) -> None:
    assert_full_width_is_the_original(*traced(name))


@pytest.mark.parametrize("name", sorted(set(ODD) - NOT_ZEROS))
def test_slices_are_the_original_with_zeros(name: str) -> None:
    model, space = traced(name)
    assert_slices_are_zeros(model, space, some_widths(space))


@pytest.mark.parametrize("name", sorted(set(ODD) - {"SpectralNorm"}))  # whose Python code changes it in training
def test_paths_are_builds(name: str) -> None:
    space = traced(name)[1]
    assert_paths_are_builds(space, some_widths(space))


def test_what_nothing_reads_stays_as_it_is() -> None:
    model, space = traced("DeadEnds")
    network = space.build(space.min)
    for name in ("unused.weight", "norm.weight", "table"):
        assert dict(network.state_dict())[name].shape == model.state_dict()[name].shape


def test_no_gradient_leaves_a_block_without() -> None:
    _, space = traced("NoGradient")
    net = Supernet(space)
    net(X, space.max).sum().backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    assert gradients["inner.0.weight"] is None
    assert gradients["stem.0.weight"] is not None


def test_inputs_by_name() -> None:
    model, space = traced("TwoInputs")
    named = trace(model, {"mask": MASK, "x": X})
    assert named == space
    close_to = Supernet(named, "ua")
    close_to.load_state_dict(model.state_dict())
    torch.testing.assert_close(close_to({"x": X, "mask": MASK}, named.max), model.train()(X, MASK))
    model.eval()
    assert_paths_are_builds(named, some_widths(named))
    with pytest.raises(BcnetError, match=r"^the batch has x, but the example input has mask, x$"):
        close_to({"x": X}, named.max)


class Positional(TwoInputs):
    """Takes both inputs as one pair."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(*pair)


def test_inputs_within_inputs() -> None:
    torch.manual_seed(0)
    space = trace(Positional().double(), ((X, MASK),))
    assert space.names == ("stem.0",)
    assert_paths_are_builds(space, some_widths(space))


def test_structured_outputs_come_back_as_they_were() -> None:
    model, space = traced("Dictionary")
    graph = space.from_graph(space.max)
    assert graph(X).keys() == {"logits", "loss"}
    torch.testing.assert_close(graph(X)["logits"], model(X)["logits"])
    assert isinstance(Supernet(space)(X, space.min), Tensor)


def test_an_adapter_picks_the_outputs_that_matter() -> None:
    torch.manual_seed(0)
    sentence = (
        r"^this network has no channel dimension that could vary \(stem.0: it is the network's output; inner.0: it is "
        r"the network's output\); trace\(..., output=lambda y: ...\) picks the outputs that matter$"
    )
    with pytest.raises(BcnetError, match=sentence):
        trace(Features().double(), X)
    space = trace(Features().double(), X, output=lambda maps: maps[-1])
    assert space.names == ("stem.0",)
    assert len(space.build(space.min)(X)) == 2
    assert_paths_are_builds(space, some_widths(space))


def test_the_usual_outputs_are_found() -> None:
    model, space = traced("Answering")
    assert isinstance(model, Answering)
    assert tensors(space.output(model(X)))[0].shape == (2, 5)
    assert isinstance(space.build(space.min), Answering)
    assert isinstance(traced("Dictionary")[0], Dictionary)


class PerImage(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.head(self.stem(image[None]).mean((2, 3))) for image in x])


def test_a_loop_over_the_batch_is_said_at_once() -> None:
    sentence = (
        r"^the forward of PerImage does other things for other batch sizes, so that its graph takes batches of 2 only, "
        r"and it can have no supernet: its forward must not loop over the batch$"
    )
    with pytest.warns(UserWarning, match=sentence):
        space = trace(PerImage().double(), X)
    assert space.build(space.min)(torch.cat([X, X])).shape == (4, 5)
    with pytest.raises(BcnetError, match="was captured for batches of 2 only"):
        Supernet(space)


class LeavesTorch(Tiny):
    def body(self, x: Tensor) -> Tensor:
        return x * float(x.detach().numpy().mean())


def test_what_cannot_be_exported_is_named() -> None:
    line = LeavesTorch.body.__code__.co_firstlineno + 1
    with pytest.raises(BcnetError) as caught:
        trace(LeavesTorch().double(), X)
    assert str(caught.value) == (
        "torch.export cannot capture LeavesTorch: its forward leaves torch for numpy (test_odd_networks.py, line "
        f"{line}: return x * float(x.detach().numpy().mean())); use torch's own functions there, or trace a module "
        "that wraps the network and leaves that part out, or switch it off where there is an option"
    )


class Merges(Tiny):
    """Makes the weights of a layer anew in evaluation, behind autograd's back."""

    def body(self, x: Tensor) -> Tensor:
        if not self.training:
            self.stem[0].weight.data = self.stem[0].weight.data * 2
        return x * self.stem[0].weight.data.sum()


class InTraining(nn.Module):
    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network.train()(x)


def test_contents_given_to_a_tensor_are_named_and_the_advice_works() -> None:
    with pytest.raises(
        BcnetError, match=r"Merges: its forward gives a tensor other contents \(test_odd.*calls its train"
    ):
        trace(Merges().double(), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [v.name for v in trace(InTraining(Merges().double()), X).variables] == ["network.stem.0"]


class Anchored(Tiny):
    """Has a layer for training only, and numbers that evaluation makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.aside, self.anchors = nn.Conv2d(12, 12, 1), torch.ones(3, dtype=torch.float64)

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            return x + self.aside(x) * self.anchors.mean()
        self.anchors = torch.full((3,), 2.0, dtype=x.dtype)
        return x * self.anchors.mean()


def test_what_evaluation_makes_anew_is_a_constant_of_training() -> None:
    assert [v.layers for v in trace(Anchored().double(), X).variables] == [("stem.0", "stem.1", "head", "aside")]


class Found:
    def __init__(self, points: Tensor):
        self.points = points


class Finds(Tiny):
    def forward(self, x: Tensor) -> list[Found]:
        return [Found(super().forward(x))]


def test_outputs_of_unknown_kinds_are_named_and_the_advice_works() -> None:
    with pytest.raises(BcnetError, match=r"its output holds test_odd_networks.Found, which is no tensor; pick tensors"):
        trace(Finds().double(), X)
    assert len(trace(Finds().double(), X, output=lambda y: y[0].points)) == 1


class ByHand(torch.autograd.Function):
    """Runs a layer with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            y = layer(x)
        ctx.weights = weights
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, *(torch.ones_like(w) for w in ctx.weights)


class Reversible(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(12, 12, 1, bias=False)

    def body(self, x: Tensor) -> Tensor:
        y = ByHand.apply(x, self.inner, *self.inner.parameters())
        x.data.set_()
        return y


def test_gradients_written_by_hand_are_said_to_be_lost_in_a_supernet() -> None:
    with pytest.warns(UserWarning, match=r"^Reversible has gradients of its own .*: stem.0.weight, the first of"):
        space = trace(Reversible().double(), X)
    assert [v.name for v in space.variables] == ["stem.0", "inner"]


def test_what_only_training_changes_is_said_to_rest_in_a_supernet() -> None:
    sentence = (
        r"^the training of SpectralNorm changes old.weight_u, the first of 4 such buffers, which rest in a supernet; "
        r"slim the trained network without one \(start: trained, score: steps or cut\)$"
    )
    with pytest.warns(UserWarning, match=sentence):
        trace(ODD["SpectralNorm"]().double(), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(Tiny().double(), X)


def test_the_share_of_flops_that_can_be_reduced() -> None:
    space = trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)).double(), X)
    assert space.reducible_flops == 1.0
    space = trace(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)).double(), X, ignore=["0"])
    assert space.reducible_flops == pytest.approx((3 * 4 + 4 * 2) / (3 * 3 + 3 * 4 + 4 * 2))


def test_kept_channels_in_another_order() -> None:
    """As in the same network with its weights in that order instead."""
    model, space = traced("Picked")
    plain = copy.deepcopy(model)
    with torch.no_grad():
        plain.inner[0].weight[:, plain.order] = model.inner[0].weight
        plain.order.copy_(torch.arange(12))
    straight = trace(plain, X)
    widths = space.min + 3
    for keep in ("l1", "fpgm"):
        found, wanted = (s.build(widths, weights_of=m, keep=keep) for s, m in ((space, model), (straight, plain)))
        torch.testing.assert_close(found.eval()(X), wanted.eval()(X))


def test_a_torch_without_a_shortcut_traces_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    network, x = nn.Sequential(*layers).eval(), torch.rand(2, 3, 8, 8)
    quick = trace(network, x)
    monkeypatch.setattr(torch_export, "_SHORTCUTS", [(torch.fx.config, "no_version_has_this", True)])
    plain = trace(network, x)
    assert [(v.name, v.max) for v in plain.variables] == [(v.name, v.max) for v in quick.variables]
    assert plain.costs["flops"](plain.max) == quick.costs["flops"](quick.max)
