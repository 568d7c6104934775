"""A dozen small networks that couple their widths in different ways, for tests of supernets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bcnet import models as zoo


def conv(inputs: int, outputs: int, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Head(nn.Sequential):
    def __init__(self, channels: int, classes: int = 5):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(channels, classes))


class Concat(nn.Module):
    """Dense connections: channels of three layers lie apart in the weight that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 6), conv(6, 4), conv(10, 5)
        self.norm = nn.BatchNorm2d(15)
        self.head = Head(15)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        ab = torch.cat([a, self.b(a)], 1)
        return self.head(self.norm(torch.cat([ab, self.c(ab)], 1)))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.SiLU(), nn.Conv2d(4, 8, 1))
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(y * torch.sigmoid(self.gate(y)))


class Grouped(nn.Module):
    """Grouped and depthwise convolutions and a residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.groups, self.depthwise, self.back = (
            conv(3, 8),
            conv(8, 8, 3, 4),
            conv(8, 8, 3, 8),
            conv(8, 8, 1),
        )
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(y + self.back(self.depthwise(self.groups(y))))


class Shuffle(nn.Module):
    """Split, work on one half, concatenate, shuffle channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.last = conv(3, 8), conv(4, 4), conv(8, 6, 1)
        self.head = Head(6)

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = self.stem(x).chunk(2, 1)
        y = torch.cat([kept, self.branch(changed)], 1)
        n, c, h, w = y.shape
        return self.head(self.last(y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)))


class LayerNorm(nn.Module):
    """A ConvNeXt block: layer norm over channels, linear layers, and a bare parameter that scales channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(nn.functional.gelu(self.wide(y)))
        return self.head(x + y.permute(0, 3, 1, 2))


class Flat(nn.Module):
    """Convolutions, a flattened map and linear layers, as LeNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(conv(3, 6), nn.MaxPool2d(4), conv(6, 5), nn.MaxPool2d(2))
        self.hidden, self.last = nn.Linear(5 * 4, 10), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.hidden(self.features(x).flatten(1))))


class Transposed(nn.Module):
    """A small U-Net: its output is a map, not logits."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = conv(3, 6), conv(6, 8)
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.norm = nn.GroupNorm(2, 12)
        self.last = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        up = self.up(self.deep(nn.functional.max_pool2d(skip, 2)))
        return self.last(self.norm(torch.cat([skip, up], 1)))


class Tied(nn.Module):
    """One block used twice: its parameters take part in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = conv(3, 6), nn.Conv2d(6, 6, 3, padding=1)
        self.head = Head(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.relu(self.block(self.stem(x)))))


def _zoo(name: str, share: int) -> Callable[[], nn.Module]:
    widths = [max(4, width // share) for width in zoo.find(name).widths]
    return lambda: zoo.build(name, widths, 5)


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "channel_bench_mobilenet": _zoo("channel_bench_mobilenet", 64),
    "channel_bench_resnet": _zoo("channel_bench_resnet", 64),
    "vgg19": _zoo("vgg19_cifar", 64),
    "resnet50": _zoo("resnet50_imagenet", 64),
    "efficientnet": _zoo("efficientnet_b0_imagenet", 16),
    "concat": Concat,
    "squeeze_excite": SqueezeExcite,
    "grouped": Grouped,
    "shuffle": Shuffle,
    "layer_norm": LayerNorm,
    "flat": Flat,
    "transposed": Transposed,
    "tied": Tied,
}


def example(name: str, batch: int = 3) -> Tensor:
    """A batch that the architecture called ``name`` takes."""
    side = 32 if name in ("vgg19", "resnet50", "efficientnet") else 16
    return torch.randn(batch, 3, side, side, dtype=torch.float64)


def with_statistics(model: nn.Module) -> nn.Module:
    """``model``, in evaluation mode, with scales, shifts and statistics of batch norm drawn."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model.eval()
