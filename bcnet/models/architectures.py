"""The structure of every network without its weights: blocks, strides, and width variables in order of first use.

Imports no torch, so names and widths are available at once; the family modules build from these architectures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Variable(NamedTuple):
    """A width variable of a zoo network with its full width; a ``fixed`` one keeps it unless it is given too.

    ``name`` is the first layer that has this width, as tracing names it too.
    """

    name: str
    width: int
    fixed: bool = False


class Stage(NamedTuple):
    """Inverted residual blocks with one output width; only the first has ``stride`` and no shortcut."""

    out: int
    stride: int
    blocks: tuple[tuple[int, int], ...]  # (kernel, expansion) of each block


class InvertedArchitecture(NamedTuple):
    """A stem, stages of inverted residual blocks, a 1x1 head."""

    stem: int
    stem_stride: int
    stages: tuple[Stage, ...]
    head: int
    act: str  # the activation, by its name in torch.nn
    squeeze: int = 0  # block input channels per squeeze channel; 0: no squeeze-and-excitation

    def variables(self) -> Iterator[Variable]:
        yield Variable("stem.conv", self.stem)
        channels = self.stem
        for i, stage in enumerate(self.stages, 1):
            for j, (_, expansion) in enumerate(stage.blocks):
                if expansion > 1:
                    yield Variable(f"stage{i}.{j}.body.expand.conv", expansion * channels)
                if self.squeeze:
                    yield Variable(f"stage{i}.{j}.body.excite.gate.squeeze", channels // self.squeeze, fixed=True)
                if j == 0:
                    yield Variable(f"stage{i}.0.body.project.conv", stage.out)
                    channels = stage.out
        yield Variable("head.conv", self.head)


class ResNetArchitecture(NamedTuple):
    """Blocks of each stage: two 3x3 convolutions, or with ``bottleneck`` 1x1, 3x3 and a four times wider 1x1."""

    blocks: tuple[int, ...]
    bottleneck: bool
    small: bool = False  # images keep their size in the stem

    def projects(self, stage: int) -> bool:
        """Whether the ``stage`` (from 1) starts with a convolution in the shortcut, so has its own output width."""
        return stage > 1 or self.bottleneck

    def variables(self) -> Iterator[Variable]:
        yield Variable("stem.conv", 64)
        for i, count in enumerate(self.blocks, 1):
            planes = 32 * 2**i
            for j in range(count):
                yield Variable(f"stage{i}.{j}.body.conv1.conv", planes)
                if self.bottleneck:
                    yield Variable(f"stage{i}.{j}.body.conv2.conv", planes)
                if j == 0 and self.projects(i):
                    last, factor = ("conv3", 4) if self.bottleneck else ("conv2", 1)
                    yield Variable(f"stage{i}.0.body.{last}.conv", factor * planes)


class VGGArchitecture(NamedTuple):
    """3x3 convolutions of each stage; max pooling between the stages."""

    stages: tuple[tuple[int, ...], ...]

    def variables(self) -> Iterator[Variable]:
        widths = [width for stage in self.stages for width in stage]
        return (Variable(f"conv{i}.conv", width) for i, width in enumerate(widths, 1))


VGG19 = VGGArchitecture(((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4))

RESNET18 = ResNetArchitecture((2, 2, 2, 2), bottleneck=False)
RESNET18_CIFAR = RESNET18._replace(small=True)
RESNET34 = ResNetArchitecture((3, 4, 6, 3), bottleneck=False)
RESNET50 = ResNetArchitecture((3, 4, 6, 3), bottleneck=True)


def _mobilenetv2(stem_stride: int, strides: tuple[int, ...]) -> InvertedArchitecture:
    shape = ((16, 1, 1), (24, 2, 6), (32, 3, 6), (64, 4, 6), (96, 3, 6), (160, 3, 6), (320, 1, 6))
    stages = [
        Stage(out, stride, ((3, expansion),) * count)
        for (out, count, expansion), stride in zip(shape, strides, strict=True)
    ]
    return InvertedArchitecture(32, stem_stride, tuple(stages), 1280, "ReLU6")


MOBILENETV2_CIFAR = _mobilenetv2(1, (1, 1, 1, 2, 1, 2, 1))
MOBILENETV2_IMAGENET = _mobilenetv2(2, (1, 2, 2, 2, 1, 2, 1))

EFFICIENTNET_B0 = InvertedArchitecture(
    stem=32,
    stem_stride=2,
    stages=(
        Stage(16, 1, ((3, 1),)),
        Stage(24, 2, ((3, 6),) * 2),
        Stage(40, 2, ((5, 6),) * 2),
        Stage(80, 2, ((3, 6),) * 3),
        Stage(112, 1, ((5, 6),) * 3),
        Stage(192, 2, ((5, 6),) * 4),
        Stage(320, 1, ((3, 6),)),
    ),
    head=1280,
    act="SiLU",
    squeeze=4,
)

PROXYLESSNAS = InvertedArchitecture(
    stem=32,
    stem_stride=2,
    stages=(
        Stage(16, 1, ((3, 1),)),
        Stage(32, 2, ((5, 3), (3, 3))),
        Stage(40, 2, ((7, 3), (3, 3), (5, 3), (5, 3))),
        Stage(80, 2, ((7, 6), (5, 3), (5, 3), (5, 3))),
        Stage(96, 1, ((5, 6), (5, 3), (5, 3), (5, 3))),
        Stage(192, 2, ((7, 6), (7, 6), (7, 3), (7, 3))),
        Stage(320, 1, ((7, 6),)),
    ),
    head=1280,
    act="ReLU6",
)


class NamedArchitecture(NamedTuple):
    """A network whose few blocks its family module spells out."""

    widths: tuple[tuple[str, int], ...]

    def variables(self) -> Iterator[Variable]:
        return (Variable(name, width) for name, width in self.widths)


# In the order of the digits of a Channel-Bench-Macro key, with the letters of its formulas: c for the outputs of
# blocks, h and m for their hidden layers.
CHANNEL_BENCH_MOBILENET = NamedArchitecture(
    (
        ("stem.conv", 128),  # c0
        ("block1.body.expand.conv", 768),  # h1
        ("block2.body.expand.conv", 768),  # h2
        ("block3.body.expand.conv", 768),  # h3
        ("block3.body.project.conv", 256),  # c4
        ("block4.body.expand.conv", 1536),  # h5
        ("head.conv", 1024),  # c6
    )
)
CHANNEL_BENCH_RESNET = NamedArchitecture(
    (
        ("stem.conv", 256),  # c0
        ("block1.body.conv1.conv", 256),  # m1
        ("block2.body.conv1.conv", 256),  # m2
        ("block3.body.conv1.conv", 512),  # m3
        ("block3.body.conv2.conv", 512),  # c4
        ("block4.body.conv1.conv", 512),  # m5
        ("block5.body.conv1.conv", 512),  # m6
    )
)
DIGITS = NamedArchitecture(
    (
        ("stem.conv", 32),
        ("block1.body.conv1.conv", 48),
        ("block2.body.expand.conv", 128),
        ("block2.body.project.conv", 64),
        ("head.conv", 128),
    )
)
# Wide where images are small and narrow where they are large, like many networks whose widths double at each stride.
CLUTTERED = NamedArchitecture(
    (
        ("stem.conv", 8),
        ("conv1.conv", 16),
        ("conv2.conv", 48),
        ("block.body.conv1.conv", 48),
        ("head.conv", 96),
    )
)

Architecture = VGGArchitecture | ResNetArchitecture | InvertedArchitecture | NamedArchitecture
