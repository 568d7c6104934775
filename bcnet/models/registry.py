"""The networks by name, with what is known about them before they are built. Imports no torch."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bcnet.errors import BcnetError, did_you_mean
from bcnet.models import architectures
from bcnet.models.architectures import Variable

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ZooModel:
    """A network of the zoo at full widths.

    ``family`` is the module that builds it from its ``architecture``. ``order`` has every width variable in order of
    first use in the forward pass; ``widths`` and ``variables`` leave out the fixed ones (squeeze-and-excitation).
    ``flops`` are multiply-accumulates of convolutions and linear layers for one input of ``input_shape`` (C, H, W).
    """

    name: str
    family: str
    architecture: architectures.Architecture
    input_shape: tuple[int, int, int]
    classes: int
    flops: int
    params: int
    about: str

    @cached_property
    def order(self) -> tuple[Variable, ...]:
        return tuple(self.architecture.variables())

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(v.width for v in self.order if not v.fixed)

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(v.name for v in self.order if not v.fixed)

    def to_dict(self) -> dict[str, Any]:
        """What is known without building it."""
        facts = {"name": self.name, "input": self.input_shape, "classes": self.classes, "variables": len(self.widths)}
        return {**facts, "flops": self.flops, "params": self.params, "about": self.about}

    def complete(self, widths: Iterable[int] | None = None) -> tuple[int, ...]:
        """One width for each variable of ``order``: those given, full where none were given, or a :class:`BcnetError`.

        ``widths`` has one number per variable, in order of first use, either without the fixed variables
        (these then keep their full width) or with all of them. Widths above the full ones are allowed.
        """
        if widths is None:
            return tuple(v.width for v in self.order)
        given = _whole(widths)
        searched = tuple(v for v in self.order if not v.fixed)
        if len(given) not in (len(searched), len(self.order)):
            every = f", or {len(self.order)} with the fixed ones" if len(self.order) > len(searched) else ""
            raise BcnetError(
                f"{self.name} has {len(searched)} width variables{every}, but {len(given)} widths were given"
            )
        given_for = searched if len(given) == len(searched) else self.order
        for number, (variable, width) in enumerate(zip(given_for, given, strict=True), 1):
            if width < 1:
                raise BcnetError(f"width {width} of variable {variable.name!r} (number {number}) must be at least 1")
        chosen = dict(zip(given_for, given, strict=True))
        return tuple(chosen.get(v, v.width) for v in self.order)


def _whole(widths: Iterable[int]) -> tuple[int, ...]:
    try:
        given = tuple(widths)
        if any(isinstance(w, bool) for w in given):
            raise TypeError
        return tuple(operator.index(w) for w in given)
    except TypeError:
        raise BcnetError(f"widths must be whole numbers, got {widths!r:.80}") from None


_Size = tuple[tuple[int, int, int], int]
_IMAGENET: _Size = ((3, 224, 224), 1000)
_CIFAR: _Size = ((3, 32, 32), 10)
_DIGITS: _Size = ((1, 8, 8), 10)
_CLUTTERED: _Size = ((1, 24, 24), 10)

# name, family, architecture, size, FLOPs, parameters; tests/models/test_zoo.py measures the figures on built networks.
_TABLE: tuple[tuple[str, str, architectures.Architecture, _Size, int, int], ...] = (
    ("digits_cnn", "digits_cnn", architectures.DIGITS, _DIGITS, 2_331_904, 51_978),
    ("cluttered_cnn", "digits_cnn", architectures.CLUTTERED, _CLUTTERED, 3_412_032, 92_578),
    ("channel_bench_mobilenet", "channel_bench", architectures.CHANNEL_BENCH_MOBILENET, _CIFAR, 211_281_920, 1_804_170),
    ("channel_bench_resnet", "channel_bench", architectures.CHANNEL_BENCH_RESNET, _CIFAR, 1_436_226_560, 15_356_170),
    ("vgg19_cifar", "vgg", architectures.VGG19, _CIFAR, 398_136_320, 20_035_018),
    ("mobilenetv2_cifar", "inverted", architectures.MOBILENETV2_CIFAR, _CIFAR, 296_473_088, 2_236_682),
    ("mobilenetv2_imagenet", "inverted", architectures.MOBILENETV2_IMAGENET, _IMAGENET, 300_774_272, 3_504_872),
    ("resnet18_cifar", "resnet", architectures.RESNET18_CIFAR, _CIFAR, 555_422_720, 11_173_962),
    ("resnet18_imagenet", "resnet", architectures.RESNET18, _IMAGENET, 1_814_073_344, 11_689_512),
    ("resnet34_imagenet", "resnet", architectures.RESNET34, _IMAGENET, 3_663_761_408, 21_797_672),
    ("resnet50_imagenet", "resnet", architectures.RESNET50, _IMAGENET, 4_089_184_256, 25_557_032),
    ("efficientnet_b0_imagenet", "inverted", architectures.EFFICIENTNET_B0, _IMAGENET, 385_814_752, 5_288_548),
    ("proxylessnas_imagenet", "inverted", architectures.PROXYLESSNAS, _IMAGENET, 320_427_584, 4_080_512),
)
_ABOUT = {
    "digits_cnn": "small net for scikit-learn's digits: a residual and an inverted residual block",
    "cluttered_cnn": "small net for digits in clutter, the example of `bcnet run`: wide where images are small",
    "channel_bench_mobilenet": "Channel-Bench-Macro's net of inverted residual blocks",
    "channel_bench_resnet": "Channel-Bench-Macro's net of basic residual blocks",
    "vgg19_cifar": "VGG19 with batch norm, global pooling and one linear layer",
    "mobilenetv2_cifar": "MobileNetV2 that strides in stages 4 and 6 only",
    "mobilenetv2_imagenet": "MobileNetV2: inverted residual blocks",
    "resnet18_cifar": "ResNet of basic blocks whose stem keeps the size of images",
    "resnet18_imagenet": "ResNet of basic blocks; stem and stage 1 share one width",
    "resnet34_imagenet": "ResNet of basic blocks; stem and stage 1 share one width",
    "resnet50_imagenet": "ResNet of bottlenecks, stride in the 3x3",
    "efficientnet_b0_imagenet": "EfficientNet-B0; squeeze widths stay fixed unless all 40 widths are given",
    "proxylessnas_imagenet": "ProxylessNAS: inverted residual blocks with kernels 3, 5 and 7",
}

MODELS: dict[str, ZooModel] = {
    name: ZooModel(name, family, architecture, *size, flops, params, _ABOUT[name])
    for name, family, architecture, size, flops, params in _TABLE
}


def find(name: str) -> ZooModel:
    """The network called ``name``, or a :class:`BcnetError` with near matches."""
    if name in MODELS:
        return MODELS[name]
    guess = did_you_mean(name, MODELS, 3)
    raise BcnetError(f"unknown model {name!r:.80}: {guess}{guess and ' '}`bcnet models` lists all")


def build(name: str, widths: Iterable[int] | None = None, classes: int | None = None) -> nn.Module:
    """The network called ``name`` as a plain module, freshly initialised: (n, C, H, W) to logits (n, classes).

    ``widths`` as in :meth:`ZooModel.complete`; full widths and the table's classes where left out.
    """
    model = find(name)
    if classes is not None and not (isinstance(classes, int) and classes >= 1):
        raise BcnetError(f"classes is {classes!r:.40}, but a classifier needs a whole number of at least 1")
    family = importlib.import_module(f"bcnet.models.{model.family}")
    count = model.classes if classes is None else classes
    own = getattr(family, name, None)  # for a network that its module spells out
    made: nn.Module = own(widths, count) if own else family.build(model.architecture, model.complete(widths), count)
    return made
