"""Random small networks are traced, counted, built, sliced and run as supernets; a failure shrinks to the smallest.

A network is a chain of blocks. A block takes as many channels as the last one gave, and is drawn with its options, so
that hypothesis can drop blocks and make them simpler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from held import (
    assert_counts,
    assert_full_width_is_the_original,
    assert_paths_are_builds,
    assert_slices_are_zeros,
    assert_weights_are_drawn,
    some_widths,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.space.network import trace

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*itself does not run at other widths"),
]
X = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def divisor(channels: int, wanted: int) -> int:
    """The largest number of groups up to ``wanted`` that divides ``channels``."""
    return next(g for g in range(min(wanted, channels), 0, -1) if channels % g == 0)


class Block(nn.Module):
    """``outputs`` is how many channels it gives; ``exact`` says that dropped channels are channels of zeros."""

    exact = True

    def __init__(self, inputs: int, width: int, groups: int):
        super().__init__()
        self.outputs = inputs
        self.make(inputs, width, groups)

    def make(self, inputs: int, width: int, groups: int) -> None:
        raise NotImplementedError


class Conv(Block):
    def make(self, inputs: int, width: int, groups: int) -> None:
        self.layer, self.outputs = nn.Conv2d(inputs, width, 3, padding=1), width

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x))


class Normed(Conv):
    """Without a bias a channel of zeros stays one."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        super().make(inputs, width, groups)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.layer(x)))


class Grouped(Block):
    def make(self, inputs: int, width: int, groups: int) -> None:
        groups = divisor(inputs, groups)
        self.outputs = groups * max(1, width // groups)
        self.layer = nn.Conv2d(inputs, self.outputs, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.layer(x))


class Depthwise(Block):
    def make(self, inputs: int, width: int, groups: int) -> None:
        self.layer = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Transposed(Block):
    def make(self, inputs: int, width: int, groups: int) -> None:
        groups = divisor(inputs, groups)
        self.outputs = groups * max(1, width // groups)
        self.layer = nn.ConvTranspose2d(inputs, self.outputs, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x))


class Shuffle(Block):
    def make(self, inputs: int, width: int, groups: int) -> None:
        self.groups = divisor(inputs, groups)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class Residual(Block):
    def make(self, inputs: int, width: int, groups: int) -> None:
        self.inner, self.outer = nn.Conv2d(inputs, width, 1), nn.Conv2d(width, inputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.relu(self.inner(x)))


class Dense(Block):
    """A concatenation of the input and what is made of it."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.layer, self.outputs = nn.Conv2d(inputs, width, 3, padding=1), inputs + width

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, F.relu(self.layer(x))], 1)


class Split(Block):
    """One half is worked on, the other is not."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.layer = nn.Conv2d(inputs // 2, inputs // 2, 1) if inputs % 2 == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            return x
        kept, changed = x.chunk(2, 1)
        return torch.cat([kept, self.layer(changed)], 1)


class Twice(Block):
    """One layer used two times."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.layer = nn.Conv2d(inputs, inputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.relu(self.layer(x)))


class TwoNames(Block):
    """A layer under two names, in a block that is built from its graph: its channels are written into the forward."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.kept = nn.Conv2d(inputs, inputs, 3, padding=1)
        self.used, self.sizes = nn.Sequential(self.kept), {"channels": inputs}

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).view(-1, self.sizes["channels"], 6, 6)


class PlainTensor(Block):
    """A scale that is neither a parameter nor a buffer."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.scale = torch.rand(inputs, 1, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Reordered(Block):
    """Channels in the order of a buffer or of a plain tensor, all of them or the half of them."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(width))
        if groups == 2:
            self.register_buffer("order", order)
        else:
            self.order = order[: max(1, inputs // 2)] if groups == 3 else order
        self.outputs, self.selects = len(self.order), groups == 8

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.order.detach()) if self.selects else x[:, self.order]


class Literal(Block):
    """Channels in an order that the forward itself writes down or computes, all of them or all but one."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.way, self.outputs = groups, inputs - (groups == 3)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.way == 2:
            return x.index_select(1, torch.arange(n - 1, -1, -1))
        if self.way == 8:
            return x[:, torch.tensor([*range(1, n, 2), *range(0, n, 2)])]
        return x[:, [-1, *range(n - 2)]] if self.way == 3 else x[:, [*range(n // 2, n), *range(n // 2)]]


class Shifted(Block):
    """Parts of the channels moved in space, written into zeros."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.part = inputs // groups

    def forward(self, x: Tensor) -> Tensor:
        moved = torch.zeros_like(x)
        moved[:, : self.part, 1:] = x[:, : self.part, :-1]
        moved[:, self.part :] = x[:, self.part :]
        return moved


class PaddedShortcut(Block):
    """Zero channels on both sides of the shortcut."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.layer, self.outputs = nn.Conv2d(inputs, inputs + 8, 3, padding=1), inputs + 8

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.pad(x, (0, 0, 0, 0, 4, 4))


class PredictedKernels(Block):
    """Every image has depthwise kernels of its own."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.layer = nn.Linear(inputs, inputs * 9)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        kernels = self.layer(x.mean((2, 3))).view(n * c, 1, 3, 3)
        return F.conv2d(x.reshape(1, n * c, h, w), kernels, padding=1, groups=n * c).view(n, c, h, w)


class MixedKernels(Block):
    """Every image has a kernel of its own, a mixture of three; how many are mixed stays, since costs are quadratic."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.kernels, self.routes = nn.Parameter(torch.randn(3, width, inputs, 3, 3)), nn.Linear(inputs, 3)
        self.outputs, self.way = width, groups % 3

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        routes, width = self.routes(x.mean((2, 3))).softmax(1), self.kernels.shape[1]
        flat = self.kernels.view(3, -1) if self.way == 0 else self.kernels.flatten(1)
        mixed = torch.mm(routes, flat).view(-1, c, 3, 3) if self.way == 1 else (routes @ flat).view(n * width, c, 3, 3)
        return F.conv2d(x.reshape(1, n * c, h, w), mixed, padding=1, groups=n).view(n, width, h, w)


class DoubledBatch(Block):
    """A batch run together with its mirror image and parted again, in the three ways torch has."""

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.layer, self.outputs, self.way = nn.Conv2d(inputs, width, 3, padding=1), width, groups % 3

    def forward(self, x: Tensor) -> Tensor:
        n, both = len(x), self.layer(torch.cat([x, x.flip(3)]))
        if self.way == 0:
            first, second = both.split([n, n])
        elif self.way == 1:
            first, second = both.narrow(0, 0, n), both.narrow(0, n, n)
        else:
            first, second = both[:n], both[n:]
        return first * second


class SqueezeExcite(Block):
    def make(self, inputs: int, width: int, groups: int) -> None:
        self.reduce, self.expand = nn.Conv2d(inputs, width, 1), nn.Conv2d(width, inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class GroupNormed(Block):
    exact = False  # a norm sees how many channels there are

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.norm = nn.GroupNorm(divisor(inputs, groups), inputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class LayerNormed(Block):
    exact = False

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.norm = nn.LayerNorm(inputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ChannelAttention(Block):
    exact = False  # the softmax runs over channels

    def make(self, inputs: int, width: int, groups: int) -> None:
        self.query, self.key = nn.Conv2d(inputs, inputs, 1), nn.Conv2d(inputs, inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x).flatten(2) @ self.key(x).flatten(2).transpose(1, 2)
        return x + (scores.softmax(-1) @ x.flatten(2)).view_as(x)


BLOCKS: list[type[Block]] = [
    Conv, Normed, Grouped, Depthwise, Transposed, Shuffle, Residual, Dense, Split, Twice, TwoNames,
    PlainTensor, Reordered, Literal, Shifted, PaddedShortcut, PredictedKernels, MixedKernels, DoubledBatch,
    SqueezeExcite, GroupNormed, LayerNormed, ChannelAttention,
]  # fmt: skip
# Networks of these alone vary in every layer but those that give the output or mix kernels.
FREE = {Conv, Normed, Depthwise, Residual, Dense, Twice, SqueezeExcite, PredictedKernels, MixedKernels, DoubledBatch}
DRAWN = st.lists(
    st.tuples(st.sampled_from(BLOCKS), st.sampled_from([4, 6, 8, 12]), st.sampled_from([2, 3, 4, 8])),
    min_size=1,
    max_size=6,
)


class Network(nn.Module):
    def __init__(self, blocks: list[tuple[type[Block], int, int]]):
        super().__init__()
        self.stem, channels = nn.Conv2d(3, 8, 3, padding=1), 8
        self.blocks = nn.Sequential()
        for kind, width, groups in blocks:
            self.blocks.append(kind(channels, width, groups))
            channels = self.blocks[-1].outputs
        self.head = nn.Linear(channels, 5)
        self.exact = all(kind.exact for kind, _, _ in blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.blocks(self.stem(x))).mean((2, 3)))


def random_networks(test: Callable[..., None]) -> Any:
    quick = settings(max_examples=22, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    kinds = TwoNames, DoubledBatch, PlainTensor, Reordered, Grouped, Reordered
    seldom = [[(kind, 8, groups) for kind in kinds] for groups in (2, 3, 4)]
    seldom += [[(Literal, 8, groups), (Conv, 6, 2), (Shifted, 8, groups)] for groups in (2, 3, 4, 8)]
    seldom += [
        [(PaddedShortcut, 8, 2), (Literal, 8, 3)],
        [(PredictedKernels, 8, 2)],
        *([(MixedKernels, 6, groups), (Normed, 8, 2), (MixedKernels, 4, groups)] for groups in (2, 3, 4)),
        [(Shifted, 8, 3), (Literal, 8, 2)],
    ]
    for blocks in seldom:
        test = example(blocks)(test)
    return quick(given(DRAWN)(test))


@random_networks
def test_random_networks(blocks: list[tuple[type[Block], int, int]]) -> None:
    torch.manual_seed(0)
    model = Network(blocks).double().eval()
    try:
        space = trace(model, X, groups=4)
    except BcnetError as error:
        if "no channel dimension that could vary (" in str(error):
            return
        raise
    widths = some_widths(space, len(blocks))
    assert_full_width_is_the_original(model, space)
    assert_counts(space, widths)
    assert_weights_are_drawn(space, widths[1])
    if model.exact:
        assert_slices_are_zeros(model, space, widths[:2])
    assert_paths_are_builds(space, widths[:2])
    fixed = {layer for layer, _ in space.fixed}
    varying = {layer for v in space.variables for layer in v.layers}
    layers = {name for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear))}
    assert layers <= fixed | varying
    if FREE.issuperset(kind for kind, _, _ in blocks):
        assert not {name for name in fixed & layers if not name.endswith(("head", ".routes"))}
