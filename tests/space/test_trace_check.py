"""The check at the end of tracing: what is not as it should be is one sentence that names the layer."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_networks import Tiny, X, conv, tiny
from torch import Tensor

import bcnet.space.check
from bcnet.errors import BcnetError
from bcnet.space.axis import Axis, Size
from bcnet.space.check import self_check
from bcnet.space.network import trace
from bcnet.space.resize import sliced

WAY_OUT = "trace(..., check=False) leaves this check out, and ignore=[...] keeps the layer at its width"


@contextmanager
def taught(name: str, **columns: object) -> Iterator[None]:
    """The table of operators with some columns of one entry changed."""
    before = bcnet.space.OPERATORS[name]
    bcnet.space.OPERATORS[name] = replace(before, **columns)  # type: ignore[arg-type]
    try:
        yield
    finally:
        bcnet.space.OPERATORS[name] = before


def test_a_wrong_shape_names_the_layer() -> None:
    """Group norm that does not say that its groups go with the channels."""
    with taught("aten::group_norm", sizes=None):
        with pytest.raises(BcnetError) as caught:
            trace(tiny("GroupNormed"), X)
        assert str(caught.value) == (
            "fine (aten::group_norm) does not run at other widths: Expected number of channels in input to be "
            f"divisible by num_groups, but got input of shape [2, 14, 8, 8] and num_groups=10; {WAY_OUT}"
        )
        assert len(trace(tiny("GroupNormed"), X, check=False)) == 3


def test_another_shape_than_expected_names_the_layer() -> None:
    space = trace(tiny("Residual"), X)
    node = next(n for n in space.graph.graph.nodes if n.name == "conv2d_1")
    sizes = dict(space.coupling.sizes)
    sizes[node.name] = ((sizes[node.name][0][0], Size(10), *sizes[node.name][0][2:]),)
    space.coupling = replace(space.coupling, sizes=sizes)
    with pytest.raises(BcnetError) as caught:
        self_check(space)
    assert str(caught.value) == (
        "inner.0 (aten::conv2d) gives shape (2, 7, 8, 8) at other widths, but (2, 10, 8, 8) was expected; " + WAY_OUT
    )


def test_wrong_flops_name_the_layer() -> None:
    with taught("aten::linear", macs=lambda site: [site.out]), pytest.raises(BcnetError) as caught:
        trace(tiny("Residual"), X)
    assert str(caught.value) == (
        "head (aten::linear) has 110 FLOPs by torch's counter, but the space says 10; say what it multiplies with "
        'bcnet.space.register("aten::linear", couple=..., macs=...)'
    )


def test_an_operator_that_multiplies_is_never_free() -> None:
    """Without its column it is counted by torch, as in the full network, with a warning."""
    sentence = (
        r"^bcnet does not know what the operator aten::linear \(in head\) multiplies and counts its FLOPs as in the "
        r'full network; say it with bcnet.space.register\("aten::linear", couple=..., macs=...\)$'
    )
    right = trace(tiny("Residual"), X).costs["flops"]
    with taught("aten::linear", macs=None), pytest.warns(UserWarning, match=sentence):
        space = trace(tiny("Residual"), X, check=False)
    assert space.costs["flops"](space.max) == right(space.max)
    assert space.costs["flops"](space.min) > right(space.min)


class Bilinear(Tiny):
    """An operator that no entry knows, but torch's counter does."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = torch.nn.Bilinear(12, 12, 12)
        self.inner = conv(12, 10)
        self.outer = conv(10, 12)

    def body(self, x: Tensor) -> Tensor:
        mean = self.outer(self.inner(x)).mean((2, 3))
        return x * self.pair(mean, mean)[..., None, None]


def test_an_unknown_operator_counts_what_torch_counts() -> None:
    with pytest.warns(UserWarning, match="bcnet does not know the operator aten::bilinear"):
        space = trace(Bilinear().double(), X)
    assert space.names == ("inner.0",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert space.reducible_flops < 1


def test_a_path_that_takes_other_weights_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    space = trace(tiny("Residual"), X)
    monkeypatch.setattr(type(space), "total_units", lambda self, shapes: self.units(self.max))
    with pytest.raises(BcnetError) as caught:
        self_check(space)
    assert str(caught.value) == (
        f"stem.0.weight: a path of a supernet takes other weights than the plain network of its widths; {WAY_OUT}"
    )


def test_a_path_that_answers_otherwise_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    space = trace(tiny("Residual"), X)

    def other(tensor: Tensor, axes: tuple[Axis, ...], *cut: Any) -> Tensor:
        part = sliced(tensor, axes, *cut)
        return part.flip(1) if part.shape[1:] == (7, 3, 3) else part

    monkeypatch.setattr(bcnet.space.check, "sliced", other)
    with pytest.raises(BcnetError) as caught:
        self_check(space)
    assert str(caught.value) == (
        "outer.0 (aten::conv2d): a path of a supernet answers otherwise than the plain network of its widths; "
        + WAY_OUT
    )


class NeedsTwo(Tiny):
    """Runs on even batches only, which the example has."""

    def body(self, x: Tensor) -> Tensor:
        return x.view(-1, 2, *x.shape[1:]).flip(1).reshape(x.shape)


def test_a_batch_size_that_does_not_run_names_the_layer() -> None:
    with pytest.raises(BcnetError, match=r"^view \(aten::view\) does not run at a batch of 3: shape "):
        trace(NeedsTwo().double(), X)


class Seldom(Tiny):
    """Draws from Python, which a graph cannot."""

    def body(self, x: Tensor) -> Tensor:
        return x * random.random()


class Noisy(Tiny):
    """Draws from torch, as its graph does."""

    def body(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_a_network_that_answers_otherwise_than_its_graph_is_told() -> None:
    with pytest.warns(
        UserWarning, match=r"^Seldom answers otherwise than its graph on the same input: its forward must"
    ):
        trace(Seldom().double(), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trace(Noisy().double(), X).own_class


class Chosen(Tiny):
    """As many images as have something to show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Conv2d(12, 12, 1)

    def body(self, x: Tensor) -> Tensor:
        return self.inner(x[x.flatten(1).amax(1).nonzero()[:, 0]])


def test_flops_that_depend_on_values_are_told() -> None:
    sentence = (
        r"^inner \(aten::conv2d\) works on as many rows as the values of its input say, and its FLOPs are counted"
    )
    with pytest.warns(UserWarning, match=sentence):
        space = trace(Chosen().double(), X)
    assert space.names == ("stem.0", "inner")


class Branching(Tiny):
    def body(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))  # type: ignore[no-any-return]


def test_what_is_no_operator_of_a_table_cannot_be_taught() -> None:
    sentence = r"^bcnet does not know the operator cond .*; write that part with plain operators if its channels should"
    with (
        pytest.warns(UserWarning, match=sentence),
        pytest.raises(BcnetError, match="operator cond is unknown to bcnet"),
    ):
        trace(Branching().double(), X)


class HalfPrecision(Tiny):
    """A block in another precision, which is asserted where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv(12, 12)

    def body(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
        return y.to(x.dtype)


def test_a_block_of_autocast_is_traced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        space = trace(HalfPrecision(), X.float())
        assert space.own_class
    assert space.names == ("stem.0", "inner.0")
    torch.testing.assert_close(space.build(space.min).eval()(X.float()).shape, torch.Size([2, 5]))


class Lazy(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.LazyLinear(5)


class Silent(Tiny):
    def forward(self, x: Tensor) -> str:  # type: ignore[override]
        return "nothing"


def test_what_is_not_ready_says_so() -> None:
    sentence = r"^Lazy has layers that take their sizes from the first input: run it once on the example input first"
    with pytest.raises(BcnetError, match=sentence):
        trace(Lazy(), X.float())
    with pytest.raises(BcnetError, match=r"^Silent gives no tensor: its forward must return its outputs$"):
        trace(Silent().double(), X)
