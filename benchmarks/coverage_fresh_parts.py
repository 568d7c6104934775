"""More of coverage_fresh.py: gates, dense links, kernels that are computed, attention, odd shortcuts."""

from __future__ import annotations

import math

import torch
from coverage_fresh import fresh
from coverage_own import block, head
from torch import Tensor, nn
from torch.nn import functional as F


class RepBlock(nn.Module):
    """RepVGG in training form: 3x3, 1x1 and identity with a norm each."""

    def __init__(self, i: int, o: int, stride: int = 1):
        super().__init__()
        self.dense = nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o))
        self.point = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
        self.same = nn.BatchNorm2d(i) if i == o and stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        same = 0 if self.same is None else self.same(x)
        return F.relu(self.dense(x) + self.point(x) + same)


@fresh()
class RepVgg(nn.Module):
    """Multi-branch blocks with and without the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(RepBlock(3, 24, 2), RepBlock(24, 24), RepBlock(24, 48, 2), RepBlock(48, 48))
        self.head = head(48)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@fresh()
class ChannelGates(nn.Module):
    """NAFNet's simple gate, a gated linear unit, efficient channel attention and CBAM's two gates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c = (
            block(3, 32),
            nn.Conv2d(32, 64, 1),
            nn.Conv2d(32, 64, 3, 1, 1),
            block(32, 32),
        )
        self.eca = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.shared = nn.Sequential(nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Conv2d(8, 32, 1))
        self.spatial, self.head = nn.Conv2d(2, 1, 7, padding=3), head(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left, right = self.a(x).chunk(2, dim=1)
        x = F.glu(self.b(left * right), 1) + x
        gate = self.eca(x.mean((2, 3)).unsqueeze(1)).squeeze(1).sigmoid()
        x = self.c(x * gate[:, :, None, None].expand_as(x))
        x = x * torch.sigmoid(self.shared(F.adaptive_avg_pool2d(x, 1)) + self.shared(F.adaptive_max_pool2d(x, 1)))
        maps = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
        return self.head(x * torch.sigmoid(self.spatial(maps)))


@fresh()
class HarmonicDense(nn.Module):
    """HarDNet: layers read those at distances of powers of two, and odd ones leave the block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, widths, layers = block(3, 20), [20], []
        for i in range(1, 7):
            sources = self._sources(i)
            o = 12 + 4 * len(sources)
            layers.append(block(sum(widths[s] for s in sources), o))
            widths.append(o)
        self.layers = nn.ModuleList(layers)
        self.head = head(sum(widths[i] for i in (1, 3, 5, 6)))

    @staticmethod
    def _sources(i: int) -> list[int]:
        return [i - 2**k for k in range(4) if i % 2**k == 0 and i - 2**k >= 0]

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for i, layer in enumerate(self.layers, 1):
            found.append(layer(torch.cat([found[s] for s in self._sources(i)], 1)))
        return self.head(torch.cat([found[i] for i in (1, 3, 5, 6)], 1))


@fresh()
class DualPath(nn.Module):
    """A residual and a dense path cut from one convolution's output by slices that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.base = block(3, 32), 24
        self.blocks = nn.ModuleList([nn.Sequential(block(32 + 8 * i, 16, 1), block(16, 32)) for i in range(3)])
        self.head = head(24 + 8 * 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.blocks:
            y = layer(x)
            x = torch.cat([x[:, : self.base] + y[:, : self.base], x[:, self.base :], y[:, self.base :]], 1)
        return self.head(x)


@fresh()
class MixedExperts(nn.Module):
    """CondConv: kernels mixed by routing weights computed from the input, run as one grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.route = block(3, 16, 3, 2), nn.Linear(16, 4)
        self.kernels, self.norm, self.head = (
            nn.Parameter(torch.randn(4, 24, 16, 3, 3) * 0.1),
            nn.BatchNorm2d(24),
            head(24),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        routes = torch.sigmoid(self.route(x.mean((2, 3))))
        kernels = (routes @ self.kernels.flatten(1)).view(n * 24, 16, 3, 3)
        y = F.conv2d(x.reshape(1, n * c, h, w), kernels, padding=1, groups=n).view(n, 24, h, w)
        return self.head(F.relu(self.norm(y)))


@fresh()
class PredictedKernels(nn.Module):
    """Depthwise kernels predicted by a small network from the pooled input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.predict, self.point, self.head = (
            block(3, 16, 3, 2),
            nn.Linear(16, 16 * 9),
            block(16, 32, 1),
            head(32),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        kernels = self.predict(x.mean((2, 3))).view(n * c, 1, 3, 3)
        y = F.conv2d(x.view(1, n * c, h, w), kernels, padding=1, groups=n * c).view(n, c, h, w)
        return self.head(self.point(F.relu(y)))


@fresh()
class SwappedChannels(nn.Module):
    """Channels put in another order by literal numbers: a pair swapped, all reversed, even before odd."""

    def __init__(self) -> None:
        super().__init__()
        self.flow, self.a, self.b = nn.Conv2d(3, 2, 3, padding=1), block(2, 16), block(16, 16)
        self.order, self.head = [*range(0, 16, 2), *range(1, 16, 2)], head(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, [2, 1, 0]]
        y = self.a(self.flow(x)[:, [1, 0]])
        y = y + self.b(y)[:, self.order]
        return self.head(torch.index_select(y, 1, torch.arange(15, -1, -1)))


@fresh()
class TemporalShift(nn.Module):
    """Channels shifted in space by fixed eighths, as in shift networks, by writing into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = block(3, 32, 3, 2), block(32, 32, 1), head(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        part = x.shape[1] // 4
        out = torch.zeros_like(x)
        out[:, :part, :, 1:] = x[:, :part, :, :-1]
        out[:, part : 2 * part, :, :-1] = x[:, part : 2 * part, :, 1:]
        out[:, 2 * part :] = x[:, 2 * part :]
        return self.head(x + self.mix(out))


@fresh()
class BlurPooled(nn.Module):
    """A fixed blur kernel repeated for every channel, made from a buffer, and anti-aliased downsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = block(3, 24), block(24, 40), head(40)
        one = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("blur", (one[:, None] * one[None] / 16)[None, None])

    def _down(self, x: Tensor) -> Tensor:
        c = x.shape[1]
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), self.blur.repeat(c, 1, 1, 1), stride=2, groups=c)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._down(self.b(self._down(self.a(x)))))


@fresh()
class LinearAttention(nn.Module):
    """Channel attention of Restormer: queries and keys normalised over pixels, a temperature for every head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.temperature = 4, nn.Parameter(torch.ones(4, 1, 1))
        self.stem, self.qkv = block(3, 32, 3, 2), nn.Conv2d(32, 96, 1, bias=False)
        self.deep, self.out, self.head = nn.Conv2d(96, 96, 3, padding=1, groups=96), nn.Conv2d(32, 32, 1), head(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        q, k, v = self.deep(self.qkv(x)).chunk(3, 1)
        q, k, v = (t.reshape(n, self.heads, c // self.heads, h * w) for t in (q, k, v))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(-1)
        return self.head(x + self.out((weights @ v).reshape(n, c, h, w)))


@fresh()
class NonLocal(nn.Module):
    """A non-local block with subsampled keys, and a position encoding computed from the width in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.theta, self.phi, self.g = (
            block(3, 32, 3, 2),
            nn.Conv2d(32, 16, 1),
            nn.Conv2d(32, 16, 1),
            nn.Conv2d(32, 16, 1),
        )
        self.out, self.head = nn.Conv2d(16, 32, 1), head(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        step = torch.exp(torch.arange(0, c, 2) * (-math.log(100.0) / c))
        place = torch.arange(h * w)[:, None] * step[None]
        encoding = torch.cat([place.sin(), place.cos()], 1).t().reshape(1, c, h, w)
        x = x + encoding
        small = F.max_pool2d(x, 2)
        q, k, v = self.theta(x).flatten(2), self.phi(small).flatten(2), self.g(small).flatten(2)
        y = torch.bmm(torch.bmm(q.transpose(1, 2), k).softmax(-1), v.transpose(1, 2))
        return self.head(x + self.out(y.transpose(1, 2).reshape(n, -1, h, w)))


@fresh()
class PaddedShortcut(nn.Module):
    """ResNet for CIFAR with option A: shortcuts by strided slicing and zero channels on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 16)
        self.first, self.second = (
            nn.Sequential(block(16, 32, 3, 2), block(32, 32)),
            nn.Sequential(block(32, 64, 3, 2), block(64, 64)),
        )
        self.head = head(64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part, extra in ((self.first, 8), (self.second, 16)):
            x = part(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, extra, extra))
        return self.head(x)


@fresh()
class Octave(nn.Module):
    """Octave convolution: high and low frequencies exchanged between tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.split = block(3, 32), nn.ModuleList([block(32, 24), block(32, 8)])
        self.paths = nn.ModuleDict(
            {
                "hh": nn.Conv2d(24, 24, 3, 1, 1),
                "hl": nn.Conv2d(24, 8, 3, 1, 1),
                "lh": nn.Conv2d(8, 24, 3, 1, 1),
                "ll": nn.Conv2d(8, 8, 3, 1, 1),
            }
        )
        self.head = head(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        high, low = self.split[0](x), self.split[1](F.avg_pool2d(x, 2))
        p = self.paths
        high, low = (
            p["hh"](high) + F.interpolate(p["lh"](low), scale_factor=2),
            p["ll"](low) + p["hl"](F.avg_pool2d(high, 2)),
        )
        return self.head(torch.cat([F.avg_pool2d(high, 2), low], 1).relu())
