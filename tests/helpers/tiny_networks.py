"""Tiny networks, one for each way in which channels are coupled. All take a batch of 3x8x8 images."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from architectures import with_statistics
from torch import Tensor, nn

from bcnet.space.network import NetworkSpace, trace


def conv(inputs: int, outputs: int, kernel: int = 1, **options: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Tiny(nn.Module):
    """A stem of ``width`` channels, a body and a linear head."""

    def __init__(self, width: int = 12, out: int | None = None):
        super().__init__()
        self.stem = conv(3, width, 3)
        self.head = nn.Linear(width if out is None else out, 5)

    def body(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Residual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = conv(12, 10, 3), conv(10, 12, 3)

    def body(self, x: Tensor) -> Tensor:
        return F.relu(x + self.outer(self.inner(x)))


class SqueezeExcite(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)

    def body(self, x: Tensor) -> Tensor:
        gate = self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


class ChannelAttention(Tiny):
    """Efficient channel attention: a convolution along the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def body(self, x: Tensor) -> Tensor:
        gate = self.attention(x.mean((2, 3)).view(x.shape[0], 1, -1))
        return x * gate.view(x.shape[0], -1, 1, 1).sigmoid()


class Dense(Tiny):
    """Every layer sees the concatenation of all before it."""

    def __init__(self) -> None:
        super().__init__(12, 24)
        self.first, self.second = conv(12, 6, 3), conv(18, 6, 3)

    def body(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.first(x)], 1)
        return torch.cat([x, self.second(x)], 1)


class Shuffle(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.branch = conv(6, 6, 3)

    def body(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, dim=1)
        x = torch.cat([kept, self.branch(changed)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class WideGroups(Tiny):
    """Two groups of eight channels: each group loses the same channels."""

    def __init__(self) -> None:
        super().__init__(16)
        self.grouped = conv(16, 16, 3, groups=2)

    def body(self, x: Tensor) -> Tensor:
        return self.grouped(x)


class NarrowGroups(Tiny):
    """Eight groups of two channels: whole groups go."""

    def __init__(self) -> None:
        super().__init__(16)
        self.grouped = conv(16, 16, 3, groups=8)

    def body(self, x: Tensor) -> Tensor:
        return self.grouped(x)


class Depthwise(Tiny):
    """A depthwise layer with two outputs for each input."""

    def __init__(self) -> None:
        super().__init__(12, 24)
        self.depthwise = conv(12, 24, 3, groups=12)

    def body(self, x: Tensor) -> Tensor:
        return self.depthwise(x)


class LayerScale(Tiny):
    """A ConvNeXt block: depthwise, layer norm and linear layers with the channels last, a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.norm = nn.LayerNorm(12)
        self.expand, self.project = nn.Linear(12, 20), nn.Linear(20, 12)
        self.gamma = nn.Parameter(torch.full((12,), 0.5))

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.project(F.gelu(self.expand(y))) * self.gamma
        return x + y.permute(0, 3, 1, 2)


class SharedWeights(Tiny):
    """One layer used twice, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Conv2d(12, 12, 3, padding=1)
        self.left, self.right = nn.Conv2d(12, 8, 1, bias=False), nn.Conv2d(12, 8, 1, bias=False)
        self.right.weight = self.left.weight
        self.out = nn.Conv2d(8, 12, 1)

    def body(self, x: Tensor) -> Tensor:
        x = self.twice(F.relu(self.twice(x)))
        return self.out(self.left(x) + self.right(x.flip(3)))


class Transposed(Tiny):
    def __init__(self) -> None:
        super().__init__(12, 10)
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.grouped = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=8)
        self.out = nn.Conv2d(8, 10, 1)

    def body(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.grouped(F.relu(self.up(x)))))


class PixelShuffle(Tiny):
    def __init__(self) -> None:
        super().__init__(12, 6)
        self.up, self.out = nn.Conv2d(12, 20, 3, padding=1), nn.Conv2d(5, 6, 3, padding=1)

    def body(self, x: Tensor) -> Tensor:
        return self.out(F.relu(F.pixel_shuffle(self.up(x), 2)))


class GroupNormed(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = nn.GroupNorm(2, 12), nn.GroupNorm(10, 20)
        self.wide = nn.Conv2d(12, 20, 1)
        self.out = nn.Conv2d(20, 12, 1)

    def body(self, x: Tensor) -> Tensor:
        return self.out(self.fine(self.wide(self.coarse(x))))


class GroupDeviation(Tiny):
    """The norm of EvoNorm: the deviation of a group, blown up to its channels; few and many groups."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = 3, 6
        self.wide, self.out = nn.Conv2d(12, 12, 1), nn.Conv2d(12, 12, 1)

    def deviation(self, x: Tensor, groups: int) -> Tensor:
        n, c, h, w = x.shape
        grouped = x.reshape(n, groups, c // groups, h, w)
        deviation = grouped.var((2, 3, 4), keepdim=True).add(1e-5).sqrt()
        return deviation.expand(grouped.shape).reshape(n, c, h, w)

    def body(self, x: Tensor) -> Tensor:
        x = self.wide(x / self.deviation(x, self.few))
        return self.out(x / self.deviation(x, self.many))


class MergedBatch(Tiny):
    """Channels merged with the batch: every map is scaled by its own mean."""

    def body(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        maps = x.reshape(n * c, -1)
        return (maps / (1 + maps.mean(1, keepdim=True).abs())).reshape(n, c, h, w)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 10, 2), nn.ReLU())
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Gated(Tiny):
    """A gated linear unit, and a gate from chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.wider = nn.Conv2d(12, 16, 1), nn.Conv2d(8, 20, 1)
        self.out = nn.Conv2d(10, 12, 1)

    def body(self, x: Tensor) -> Tensor:
        x = F.glu(self.wide(x), dim=1)
        value, gate = self.wider(x).chunk(2, dim=1)
        return self.out(value * F.silu(gate))


class StandardizedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Standardized(Tiny):
    """Weight standardisation, by a norm over the flattened weight and by mean and variance."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = StandardizedConv(12, 10, 3, padding=1), nn.Conv2d(10, 12, 3, padding=1)

    def body(self, x: Tensor) -> Tensor:
        weight = self.second.weight
        mean, deviation = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
        x = F.relu(self.first(x))
        return F.conv2d(x, (weight - mean) / (deviation + 1e-5), self.second.bias, padding=1)


class PaddedShortcut(Tiny):
    """A shortcut that pads channels with zeros where the stream widens."""

    def __init__(self) -> None:
        super().__init__(8, 14)
        self.wide = conv(8, 14, 3)

    def body(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        missing = wide.shape[1] - x.shape[1]
        return wide + F.pad(x, (0, 0, 0, 0, 0, missing))


class Res2Net(Tiny):
    """Channels split by size; each part is added to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.parts = nn.ModuleList([conv(4, 4, 3) for _ in range(2)])
        self.out = conv(12, 12)

    def body(self, x: Tensor) -> Tensor:
        first, *others = torch.split(x, self.width, 1)
        done = [first]
        for part, layer in zip(others, self.parts, strict=True):
            done.append(layer(part + done[-1]))
        return self.out(torch.cat(done, 1))


class UnequalSplit(Tiny):
    """A channel axis cut into parts of different widths."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.sizes = (8, 4)
        self.small, self.large = conv(4, 4, 3), conv(8, 8, 3)

    def body(self, x: Tensor) -> Tensor:
        large, small = torch.split(x, self.sizes, dim=1)
        return torch.cat([self.large(large), self.small(small)], 1)


class Remembered(Tiny):
    """Sizes kept as attributes: a shape to view a parameter in, and the two parts of a split."""

    def __init__(self) -> None:
        super().__init__()
        self.shape, self.touched, self.untouched = (12, 1, 1), 3, 9
        self.scale = nn.Parameter(torch.rand(12))
        self.partial = conv(3, 3, 3)

    def body(self, x: Tensor) -> Tensor:
        x = x * self.scale.view(self.shape)
        touched, untouched = torch.split(x, [self.touched, self.untouched], dim=1)
        return torch.cat([self.partial(touched), untouched], 1)


class UnequalChunks(Tiny):
    """Chunks of 5, 5 and 4 channels."""

    def __init__(self) -> None:
        super().__init__(14)
        self.parts = nn.ModuleList([conv(5, 5, 3), conv(5, 5, 3), conv(4, 4, 3)])

    def body(self, x: Tensor) -> Tensor:
        return torch.cat([layer(part) for layer, part in zip(self.parts, x.chunk(3, dim=1), strict=True)], 1)


class BlurPool(Tiny):
    """A fixed kernel expanded to as many channels as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.ones(1, 1, 3, 3) / 9)
        self.out = conv(12, 12)

    def body(self, x: Tensor) -> Tensor:
        kernel = self.kernel.expand(x.shape[1], 1, 3, 3)
        return self.out(F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), kernel, stride=2, groups=x.shape[1]))


class Attention(Tiny):
    """Multi-head attention over the pixels, the heads' width may vary."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 48), nn.Linear(16, 12)

    def body(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).reshape(n, h * w, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, -1)
        return x + self.out(mixed).transpose(1, 2).reshape(n, c, h, w)


class Auxiliary(Tiny):
    """A second head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.more = conv(12, 10, 3)
        self.aux = nn.Sequential(nn.Conv2d(12, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x)
        y = self.head(self.more(x).mean((2, 3)))
        return (y, self.aux(x)) if self.training else y


NETWORKS = {
    c.__name__: c
    for c in (
        Residual, SqueezeExcite, ChannelAttention, Dense, Shuffle, WideGroups, NarrowGroups, Depthwise, LayerScale,
        SharedWeights, Transposed, PixelShuffle, GroupNormed, GroupDeviation, MergedBatch, Flattened, Gated,
        Standardized, PaddedShortcut, Res2Net, UnequalSplit, Remembered, UnequalChunks, BlurPool, Attention, Auxiliary,
    )
}  # fmt: skip


X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@cache
def traced(name: str) -> tuple[nn.Module, NetworkSpace]:
    """A network and its space, traced once in a run of the tests: neither may be changed."""
    model = tiny(name)
    return model, trace(model, X)


def tiny(name: str) -> nn.Module:
    """A network in double precision, its batch norms with statistics of their own."""
    torch.manual_seed(0)
    return with_statistics(NETWORKS[name]().double())
