"""Small networks written for the coverage benchmark, each with something that published zoos seldom have.

``OWN`` maps a name to the network and the shapes of its inputs (without the batch); those with sound, volumes, video or
several inputs and outputs are in coverage_own_shapes.py. None of them was looked at while tracing was written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

Networks = dict[str, tuple[type[nn.Module], tuple[tuple[int, ...], ...]]]
OWN: Networks = {}
IMAGE = (3, 32, 32)


def own(*shapes: tuple[int, ...], into: Networks = OWN) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(cls: type[nn.Module]) -> type[nn.Module]:
        into[cls.__name__] = (cls, shapes or (IMAGE,))
        return cls

    return add


def block(i: int, o: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU())


def head(i: int, classes: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, classes))


@own()
class MultiBranch(nn.Module):
    """Branches of different kernels and widths, concatenated, added to a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 24)
        self.branches = nn.ModuleList([block(24, o, k) for o, k in ((8, 1), (16, 3), (24, 5))])
        self.project, self.head = block(48, 24, 1), head(72)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        joined = torch.cat([branch(x) for branch in self.branches], 1)
        return self.head(torch.cat([joined, x + self.project(joined)], 1))


@own()
class GroupShuffle(nn.Module):
    """Grouped convolutions with a channel shuffle of three groups between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = block(3, 24), block(24, 48, 1, groups=3), block(48, 48), head(48)
        self.c = block(48, 24, 1, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(self.stem(x))
        n, c, h, w = y.shape
        y = y.view(n, 3, c // 3, h, w).transpose(1, 2).reshape(n, c, h, w)
        y = F.channel_shuffle(self.b(y), 3)
        return self.head(torch.cat([y, self.c(y)], 1)[:, :48])


@own()
class ParametrisedNorms(nn.Module):
    """Weight norm and spectral norm as parametrisations."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Conv2d(3, 32, 3, 2, 1))
        self.b = parametrizations.spectral_norm(nn.Conv2d(32, 64, 3, 2, 1))
        self.c = parametrizations.spectral_norm(nn.Linear(64, 32))
        self.d = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.b(F.leaky_relu(self.a(x), 0.2)), 0.2)
        return self.d(F.relu(self.c(x.mean((2, 3)))))


@own()
class EinsumAttention(nn.Module):
    """Attention over positions by einsum, four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv, self.out = block(3, 32, stride=4), nn.Conv2d(32, 96, 1), nn.Conv2d(32, 32, 1)
        self.head = head(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        q, k, v = self.qkv(x).reshape(n, 3, 4, c // 4, h * w).unbind(1)
        attention = torch.einsum("nhci,nhcj->nhij", q, k).mul((c // 4) ** -0.5).softmax(-1)
        y = torch.einsum("nhij,nhcj->nhci", attention, v).reshape(n, c, h, w)
        return self.head(x + self.out(y))


@own()
class TensorConstants(nn.Module):
    """Normalises by tensors made in the forward, and scales by one that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([0.5, 1.0, 2.0])
        self.a, self.b, self.head = block(3, 32), block(32, 32), head(32)

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.tensor([0.48, 0.46, 0.41], dtype=x.dtype).view(1, 3, 1, 1)
        x = (x - mean) * self.scale.to(x.dtype)[:, None, None]
        return self.head(self.b(self.a(x)) * torch.tensor(0.5, dtype=x.dtype))


@own()
class DeepSupervision(nn.Module):
    """A U-Net whose inner heads are only read in training."""

    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2, self.d3 = block(3, 16), block(16, 32, stride=2), block(32, 64, stride=2)
        self.u2, self.u1 = block(96, 32), block(48, 16)
        self.aux, self.out = nn.Conv2d(32, 4, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        a = self.d1(x)
        b = self.d2(a)
        c = self.d3(b)
        y = self.u2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        z = self.out(self.u1(torch.cat([F.interpolate(y, scale_factor=2.0, mode="bilinear"), a], 1)))
        return (z, self.aux(y)) if self.training else z


@own()
class UnusedLayers(nn.Module):
    """A convolution, a batch norm and a buffer that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = block(3, 32), block(32, 64, stride=2), head(64)
        self.old, self.norm = nn.Conv2d(64, 128, 3), nn.BatchNorm2d(48)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


@own((3, 16, 16))
class SuperResolution(nn.Module):
    """Pixel unshuffle, residual convolutions, pixel shuffle, a global shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(12, 32, 3, padding=1)
        self.body = nn.ModuleList([nn.Conv2d(32, 32, 3, padding=1) for _ in range(3)])
        self.grow, self.last = nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = first = self.first(F.pixel_unshuffle(x, 2))
        for layer in self.body:
            y = y + F.relu(layer(y))
        y = F.pixel_shuffle(self.grow(y + first), 2)
        return F.interpolate(x, scale_factor=2.0) + F.pixel_shuffle(self.last(y), 2)


@own()
class Maxout(nn.Module):
    """Maxout units (the largest of three channels) and a mean over stacked branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Conv2d(3, 48, 3, 2, 1), block(16, 24), block(16, 24, 5), head(24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = y.view(y.shape[0], -1, 3, *y.shape[2:]).amax(2)
        return self.head(torch.stack([self.b(y), self.c(y)]).mean(0))


@own((3, 64, 64))
class LocalResponseNorm(nn.Module):
    """AlexNet in small: local response norm, overlapping pooling, a flattened classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 7, 4, 3), nn.Conv2d(32, 64, 5, padding=2)
        self.norm, self.pool = nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * 9, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.norm(F.relu(self.a(x))))
        return self.head(self.pool(self.norm(F.relu(self.b(x)))))


@own()
class DynamicConvolution(nn.Module):
    """Every image has its own kernel, a mixture of four."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.route, self.head = block(3, 16, stride=2), nn.Linear(16, 4), head(32)
        self.experts = nn.Parameter(torch.randn(4, 32, 16, 3, 3) / 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        mixture = self.route(x.mean((2, 3))).softmax(1)
        kernels = (mixture @ self.experts.flatten(1)).view(-1, c, 3, 3)
        y = F.conv2d(x.reshape(1, n * c, h, w), kernels, padding=1, groups=n)
        return self.head(F.relu(y.view(n, -1, h, w)))


@own()
class Recursive(nn.Module):
    """One convolution applied four times, with a batch norm for each time."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared, self.head = block(3, 32), nn.Conv2d(32, 32, 3, padding=1, bias=False), head(32)
        self.norms = nn.ModuleList([nn.BatchNorm2d(32) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm in self.norms:
            x = F.relu(x + norm(self.shared(x)))
        return self.head(x)


@own((1, 28, 28))
class TiedAutoencoder(nn.Module):
    """The decoder uses the encoder's weights, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 16, 4, 2, 1), nn.Conv2d(16, 32, 3, 1, 1)
        self.code, self.decode = nn.Linear(32 * 196, 20), nn.Linear(20, 32 * 196)

    def forward(self, x: Tensor) -> Tensor:
        code = self.code(self.b(self.a(x).relu()).relu().flatten(1))
        y = self.decode(code).relu().view(-1, 32, 14, 14)
        return F.conv_transpose2d(F.conv_transpose2d(y, self.b.weight, None, 1, 1), self.a.weight, None, 2, 1)


@own()
class CoordinateConv(nn.Module):
    """Two channels of coordinates, made in the forward, are concatenated in front of every convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = block(5, 24, stride=2), block(26, 48, stride=2), head(48)

    @staticmethod
    def located(x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        rows = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(x.shape[0], 1, h, w)
        columns = torch.linspace(-1, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(x.shape[0], 1, h, w)
        return torch.cat([x, rows, columns], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.located(self.a(self.located(x)))))


@own()
class SlicedSequential(nn.Module):
    """Features taken from slices of a Sequential, as style-transfer code does."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(block(3, 16), block(16, 24, stride=2), block(24, 32), block(32, 48, stride=2))
        self.head, self.side = head(48), nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = self.features[:2](x)
        return self.head(self.features[2:](middle)), self.side(middle)


@own()
class ReorderedChannels(nn.Module):
    """A buffer says in which order the next layer sees the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = block(3, 32), block(32, 32, groups=4), head(32)
        self.register_buffer("order", torch.arange(32).view(4, 8).t().reshape(-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).index_select(1, self.order)))


@own()
class SmallSqueeze(nn.Module):
    """Squeeze-and-excitation whose inner width may become one, written with ``squeeze()`` and ``unsqueeze``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.up, self.head = block(3, 32, stride=2), nn.Linear(32, 8), nn.Linear(8, 32), head(32)
        self.spatial = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        gate = F.adaptive_avg_pool2d(x, 1).squeeze()
        x = x * self.up(F.relu(self.down(gate))).sigmoid().unsqueeze(-1).unsqueeze(-1)
        seen = torch.stack([x.mean(1), x.amax(1)], 1)
        return self.head(x * self.spatial(seen).sigmoid())


@own()
class FourierMixer(nn.Module):
    """A global filter: multiplication in the frequency domain by learned complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out, self.head = block(3, 24, stride=4), nn.Conv2d(24, 24, 1), head(24)
        self.filter = nn.Parameter(torch.randn(24, 8, 5, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        spectrum = torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(self.filter)
        return self.head(x + self.out(torch.fft.irfft2(spectrum, s=(8, 8), norm="ortho")))


@own()
class BilinearPool(nn.Module):
    """Bilinear pooling: the outer product of two trunks' channels, signed square root, normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = block(3, 16, stride=4), block(3, 12, stride=4), nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.a(x).flatten(2), self.b(x).flatten(2)
        product = (u @ v.transpose(1, 2)).flatten(1) / u.shape[-1]
        return self.head(F.normalize(product.sign() * (product.abs() + 1e-6).sqrt()))
