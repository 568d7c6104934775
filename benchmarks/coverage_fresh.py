"""Odd but plausible networks that bcnet met for the first time when they had all been written.

As coverage_own.py, and written later: what bcnet made of them before any cure is on the page of results. Those with
sequences, volumes or several inputs and outputs are in coverage_fresh_shapes.py.
"""

from __future__ import annotations

from functools import partial

import torch
from coverage_own import Networks, block, head, own
from torch import Tensor, nn
from torch.nn import functional as F

FRESH: Networks = {}
fresh = partial(own, into=FRESH)


@fresh()
class Functional(nn.Module):
    """Bare parameters and functions, no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.ParameterList([nn.Parameter(torch.randn(*s) * 0.1) for s in ((16, 3, 3, 3), (32, 16, 3, 3))])
        self.gain, self.shift = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))
        self.out = nn.Parameter(torch.randn(32, 10) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        for kernel in self.kernels:
            x = F.leaky_relu(F.conv2d(x, kernel, padding=1), 0.1)
        mean, var = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True, unbiased=False)
        x = (x - mean) * torch.rsqrt(var + 1e-5) * self.gain.view(1, -1, 1, 1) + self.shift.view(1, -1, 1, 1)
        return x.amax((2, 3)) @ self.out


@fresh()
class NestedDicts(nn.Module):
    """Stages and branches in dictionaries of dictionaries, run in the order of their keys."""

    def __init__(self) -> None:
        super().__init__()
        widths = {"early": (3, 16), "late": (16, 32)}
        self.stages = nn.ModuleDict(
            {
                name: nn.ModuleDict(
                    {"main": block(i, o), "side": nn.ModuleDict({"a": block(i, o, 1), "b": block(o, o)})}
                )
                for name, (i, o) in widths.items()
            }
        )
        self.head = head(32)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages.values():
            side = stage["side"]["b"](stage["side"]["a"](x))
            x = F.max_pool2d(stage["main"](x) + side, 2)
        return self.head(x)


@fresh()
class SharedNorms(nn.Module):
    """One convolution over three scales with a batch norm for each, as in EfficientDet's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 24)
        self.down = nn.ModuleList([block(24, 24, 3, 2) for _ in range(2)])
        self.shared = nn.ModuleList([nn.Conv2d(24, 24, 3, padding=1, bias=False) for _ in range(2)])
        self.norms = nn.ModuleList([nn.ModuleList([nn.BatchNorm2d(24) for _ in range(2)]) for _ in range(3)])
        self.last = nn.Conv2d(24, 6, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        levels = [self.stem(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        found = []
        for level, norms in zip(levels, self.norms, strict=True):
            for conv, norm in zip(self.shared, norms, strict=True):
                level = F.silu(norm(conv(level)))
            found.append(self.last(level))
        return found


@fresh()
class TrainingBranch(nn.Module):
    """An auxiliary head in training only, and a norm that is not used then."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = block(3, 16), block(16, 32, 3, 2), block(32, 48, 3, 2)
        self.aux, self.head, self.scale = head(32), head(48), nn.Parameter(torch.ones(48, 1, 1))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        middle = self.b(self.a(x))
        y = self.c(middle)
        if self.training:
            return self.head(y), self.aux(middle)
        return self.head(y * self.scale)


class ChannelNorm(nn.Module):
    """Layer norm over channels of maps, written out."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - mean) / torch.sqrt(spread + 1e-6)) + self.bias[:, None, None]


@fresh()
class CustomNorms(nn.Module):
    """Layer norm over channels, filter response norm and global response norm, all written out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 24, 4, 4), nn.Conv2d(24, 96, 1), nn.Conv2d(96, 24, 1)
        self.first, self.head = ChannelNorm(24), head(24)
        self.gamma, self.beta = nn.Parameter(torch.zeros(1, 96, 1, 1)), nn.Parameter(torch.zeros(1, 96, 1, 1))
        self.tau = nn.Parameter(torch.zeros(1, 24, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.a(x))
        y = F.gelu(self.b(x))
        energy = torch.norm(y, p=2, dim=(2, 3), keepdim=True)
        y = self.gamma * (y * energy / (energy.mean(1, keepdim=True) + 1e-6)) + self.beta + y
        x = x + self.c(y)
        x = x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-6)
        return self.head(torch.max(x, self.tau))


@fresh()
class PixelUnshuffled(nn.Module):
    """Pixels folded into channels at the start and out of them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = block(48, 32), block(32, 32), nn.Conv2d(32, 64, 3, padding=1)
        self.d, self.down = block(16, 24), block(64, 16, 1)
        self.out = nn.Conv2d(24, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(F.pixel_unshuffle(x, 4))
        y = F.pixel_shuffle(self.c(y + self.b(y)), 2)
        y = self.d(y)
        return F.pixel_shuffle(self.out(y), 2)


@fresh()
class SpaceToDepth(nn.Module):
    """Strided slices concatenated, and the same by view and permute."""

    def __init__(self) -> None:
        super().__init__()
        self.focus, self.a, self.b, self.head = block(12, 16), block(64, 24), block(96, 32), head(32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
        x = self.focus(x)
        x = self.a(torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1))
        n, c, h, w = x.shape
        x = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).contiguous().view(n, c * 4, h // 2, w // 2)
        return self.head(self.b(x))


@fresh()
class TopDown(nn.Module):
    """Features of several levels brought to one width and added from the top, weighted as in BiFPN."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([block(i, o, 3, 2) for i, o in ((3, 16), (16, 32), (32, 64))])
        self.lateral = nn.ModuleList([nn.Conv2d(i, 24, 1) for i in (16, 32, 64)])
        self.smooth = nn.ModuleList([block(24, 24, 3, groups=24) for _ in range(2)])
        self.weights, self.out = nn.Parameter(torch.ones(2, 2)), nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for level, lateral in zip(self.levels, self.lateral, strict=True):
            x = level(x)
            found.append(lateral(x))
        weights = F.relu(self.weights)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-4)
        top = found[-1]
        outs = [top]
        for i, lower in enumerate(found[-2::-1]):
            up = F.interpolate(top, size=lower.shape[-2:], mode="nearest")
            top = self.smooth[i](weights[i, 0] * lower + weights[i, 1] * up)
            outs.append(top)
        return tuple(self.out(o) for o in outs)


@fresh()
class AttentionBlock(nn.Module):
    """Multi-head self-attention over a feature map by nn.MultiheadAttention, with a residual feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, 32, 3, 2), block(32, 48, 3, 2))
        self.norm, self.attend = nn.LayerNorm(48), nn.MultiheadAttention(48, 4, batch_first=True)
        self.feed, self.head = (
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)),
            head(48),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        tokens = x.flatten(2).transpose(1, 2)
        normed = self.norm(tokens)
        tokens = tokens + self.attend(normed, normed, normed, need_weights=False)[0]
        tokens = tokens + self.feed(tokens)
        return self.head(tokens.transpose(1, 2).reshape_as(x))


class Standardised(nn.Conv2d):
    """A convolution whose kernels are standardised before use."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        mean, std = flat.mean(1).view(-1, 1, 1, 1), flat.std(1).view(-1, 1, 1, 1)
        return F.conv2d(x, (self.weight - mean) / (std + 1e-5), self.bias, self.stride, self.padding, 1, self.groups)


@fresh()
class WeightStandardised(nn.Module):
    """Weight standardisation with group norm, depthwise too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Standardised(3, 32, 3, padding=1), Standardised(32, 32, 3, padding=1, groups=32)
        self.c, self.d = Standardised(32, 64, 3, 2, 1), Standardised(64, 64, 3, padding=1)
        self.norms, self.head = nn.ModuleList([nn.GroupNorm(8, n) for n in (32, 32, 64, 64)]), head(64)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip((self.a, self.b, self.c), self.norms, strict=False):
            x = F.relu(norm(conv(x)))
        return self.head(x + F.relu(self.norms[3](self.d(x))))


class Ghost(nn.Module):
    """Half of the channels by a convolution, the other half cheaply from the first, cut to the wanted number."""

    def __init__(self, i: int, o: int):
        super().__init__()
        self.out, half = o, -(-o // 2)
        self.primary, self.cheap = block(i, half, 1), block(half, half, 3, groups=half)

    def forward(self, x: Tensor) -> Tensor:
        y = self.primary(x)
        return torch.cat([y, self.cheap(y)], 1)[:, : self.out]


@fresh()
class GhostModules(nn.Module):
    """Ghost bottlenecks, one of an odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = block(3, 16), Ghost(16, 48), Ghost(48, 16)
        self.c, self.head = Ghost(16, 25), head(25)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.c(x + self.b(self.a(x))))


class Involution(nn.Module):
    """A kernel for every place, computed from the place itself."""

    def __init__(self, channels: int, groups: int, kernel: int = 3):
        super().__init__()
        self.groups, self.kernel = groups, kernel
        self.reduce, self.span = block(channels, channels // 4, 1), nn.Conv2d(channels // 4, kernel**2 * groups, 1)
        self.unfold = nn.Unfold(kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        kernels = self.span(self.reduce(x)).view(n, self.groups, 1, self.kernel**2, h, w)
        windows = self.unfold(x).view(n, self.groups, c // self.groups, self.kernel**2, h, w)
        return (kernels * windows).sum(3).view(n, c, h, w)


@fresh()
class InvolutionNet(nn.Module):
    """Bottlenecks with involution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.mix, self.b = block(3, 32, 3, 2), block(32, 32, 1), Involution(32, 4), block(32, 32, 1)
        self.head = head(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.b(self.mix(self.a(x))))


class Partial(nn.Module):
    """A convolution of the first quarter of the channels, as in FasterNet."""

    def __init__(self, dim: int, inplace: bool):
        super().__init__()
        self.part, self.rest, self.inplace = dim // 4, dim - dim // 4, inplace
        self.conv = nn.Conv2d(self.part, self.part, 3, 1, 1, bias=False)
        self.mlp = nn.Sequential(block(dim, dim * 2, 1), nn.Conv2d(dim * 2, dim, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        if self.inplace:
            y = x.clone()
            y[:, : self.part] = self.conv(y[:, : self.part])
        else:
            a, b = torch.split(x, [self.part, self.rest], 1)
            y = torch.cat((self.conv(a), b), 1)
        return x + self.mlp(y)


@fresh()
class PartialSplit(nn.Module):
    """FasterNet's blocks by split and cat."""

    inplace = False

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 4, 4, bias=False), nn.BatchNorm2d(32))
        self.blocks, self.head = nn.Sequential(*(Partial(32, self.inplace) for _ in range(2))), head(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


@fresh()
class PartialInPlace(PartialSplit):
    """FasterNet's blocks that write into a slice."""

    inplace = True


@fresh()
class SelectiveKernels(nn.Module):
    """SKNet: two receptive fields weighted by a softmax over branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 32, 3, 2)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=d, dilation=d, groups=8), nn.BatchNorm2d(32), nn.ReLU())
            for d in (1, 2)
        )
        self.squeeze, self.excite, self.head = (
            nn.Linear(32, 16),
            nn.ModuleList([nn.Linear(16, 32) for _ in range(2)]),
            head(32),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        features = torch.stack([branch(x) for branch in self.branches], 1)
        z = F.relu(self.squeeze(features.sum(1).mean((2, 3))))
        weights = torch.softmax(torch.stack([excite(z) for excite in self.excite], 1), 1)
        return self.head((features * weights[..., None, None]).sum(1) + x)


@fresh()
class SplitAttention(nn.Module):
    """ResNeSt's radix softmax over splits of a grouped convolution."""

    radix, cardinality, channels = 2, 2, 32

    def __init__(self) -> None:
        super().__init__()
        c, r = self.channels, self.radix
        self.stem, self.conv = block(3, c, 3, 2), block(c, c * r, 3, groups=self.cardinality * r)
        self.fc1, self.fc2 = block(c, 16, 1, groups=self.cardinality), nn.Conv2d(16, c * r, 1, groups=self.cardinality)
        self.head = head(c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.stem(x))
        batch, channels = x.shape[:2]
        parts = torch.split(x, channels // self.radix, 1)
        gate = self.fc2(self.fc1(F.adaptive_avg_pool2d(sum(parts), 1)))
        gate = gate.view(batch, self.cardinality, self.radix, -1).transpose(1, 2)
        gate = F.softmax(gate, 1).reshape(batch, -1, 1, 1)
        gates = torch.split(gate, channels // self.radix, 1)
        return self.head(sum(g * p for g, p in zip(gates, parts, strict=True)))
