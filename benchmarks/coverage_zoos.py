"""Networks of public zoos with random weights, by ``zoo:NAME``, each with an input it runs on. Nothing is downloaded.

A zoo whose package is not installed is skipped. ``timm`` and ``torchvision`` had a part in the making of bcnet through
coverage_models.txt; the names in coverage_unseen.txt, of these two and all other zoos, had none.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from coverage_fresh_zoos import PLACES, make
from torch import Tensor, nn

# A torchvision built for CUDA finds its compiled operators missing on a CPU-only torch, and could not be imported.
_missing = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _missing.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
os.environ["YOLO_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

PACKAGES = {
    "timm": "timm",
    "torchvision": "torchvision",
    "tv-segmentation": "torchvision",
    "tv-video": "torchvision",
    "tv-detection": "torchvision",
    "pytorchcv": "pytorchcv",
    "smp": "segmentation_models_pytorch",
    "transformers": "transformers",
    "ultralytics": "ultralytics",
    "monai": "monai",
    "spandrel": "spandrel",
    "own": "coverage_own",
    "fresh": "coverage_fresh",
}
PACKAGES |= {name.partition(":")[0]: name.partition(":")[0] for name in PLACES}
Shapes = tuple[tuple[int, ...], ...]
IMAGES = [((3, side, side),) for side in (64, 96, 128, 160, 224, 256, 299, 331, 512)]

# The inputs to try in turn (without the batch), for names to which IMAGES do not apply.
INPUTS: dict[str, list[Shapes]] = {
    "tv-video:*": [((3, 8, 64, 64),), ((3, 16, 224, 224),)],
    "tv-detection:raft*": [((3, 128, 128), (3, 128, 128))],
    "pytorchcv:*_cifar*": [((3, 32, 32),)],
    "pytorchcv:*_svhn": [((3, 32, 32),)],
    "pytorchcv:*_cityscapes": [((3, 128, 128),)],
    "pytorchcv:*_celebamaskhq": [((3, 128, 128),)],
    "pytorchcv:jasper*": [((64, 96),)],
    "pytorchcv:quartznet*": [((64, 96),)],
    "pytorchcv:raft*": [((3, 128, 128), (3, 128, 128))],
    "pytorchcv:pfpcnet": [((3, 160, 128),)],
    "pytorchcv:superpointnet": [((1, 64, 64),)],
    "pytorchcv:*": [((3, side, side),) for side in (64, 96, 128, 224, 256, 299, 331)],
    "smp:*": [((3, side, side),) for side in (64, 128, 256)],
    "spandrel:*": [((channels, side, side),) for side in (32, 64) for channels in (3, 1)],
    "ultralytics:*": [((3, side, side),) for side in (64, 128, 256)],
    "transformers:Wav2Vec2FeatureEncoder": [((4000,),)],
    "transformers:HubertFeatureEncoder": [((4000,),)],
    "transformers:VitsHifiGan": [((192, 16),)],
    "transformers:*HifiGan": [((16, 80),)],
    "transformers:UnivNetModel": [((16, 100),)],
    "transformers:EncodecEncoder": [((1, 3200),)],
    "transformers:EncodecDecoder": [((128, 16),)],
    "transformers:DacEncoder": [((1, 3200),)],
    "transformers:DacDecoder": [((1024, 8),)],
    "transformers:MimiEncoder": [((1, 3840),)],
}


def installed(name: str) -> bool:
    """Whether the package of a ``zoo:NAME`` is here."""
    return importlib.util.find_spec(PACKAGES[name.partition(":")[0]]) is not None


def create(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network and the first of its inputs on which it runs: in training on a batch of two, or at least alone."""
    torch.manual_seed(0)
    zoo, _, own_name = name.partition(":")
    made: Any = make(name) if name in PLACES else CREATORS[zoo](own_name)
    model, shapes = made if isinstance(made, tuple) else (made, _shapes(name, made))
    for trial in (_trains, _answers):
        for inputs in shapes:
            if trial(model, inputs):
                return model, tuple(torch.randn(1, *shape) for shape in inputs)
    raise ValueError(f"runs on none of {shapes}")


def _shapes(name: str, model: nn.Module) -> list[Shapes]:
    """Inputs to try: those of INPUTS, a timm model's own where it takes no other, or the smallest image it runs on."""
    for pattern, shapes in INPUTS.items():
        if fnmatch.fnmatch(name, pattern):
            return shapes
    config: dict[str, Any] = getattr(model, "default_cfg", {})
    if config.get("fixed_input_size"):
        return [(tuple(config["input_size"]),)]
    return IMAGES


@torch.no_grad()
def _trains(model: nn.Module, shapes: Shapes) -> bool:
    try:
        model.train()(*(torch.randn(2, *shape) for shape in shapes))
    except Exception:  # a model that does not take this size is tried at the next
        return False
    return _answers(model, shapes)


@torch.no_grad()
def _answers(model: nn.Module, shapes: Shapes) -> bool:
    try:
        model.eval()(*(torch.randn(1, *shape) for shape in shapes))
    except Exception:
        return False
    return True


def _timm(name: str) -> nn.Module:
    import timm

    if name.startswith("features/"):
        return timm.create_model(name.partition("/")[2], features_only=True)
    return timm.create_model(name)


def _torchvision(name: str) -> nn.Module:
    import torchvision

    make = torchvision.models.get_model_builder(name)
    backbone = {"weights_backbone": None} if "weights_backbone" in inspect.signature(make).parameters else {}
    model: nn.Module = make(weights=None, **backbone)
    return model


class _Dense(nn.Module):
    """A torchvision detector up to its heads: what is left out draws boxes and has no channels."""

    def __init__(self, detector: nn.Module, head: bool):
        super().__init__()
        self.backbone = detector.backbone
        self.head = detector.head if head else None

    def forward(self, image: Tensor) -> Any:
        features = self.backbone(image)
        return features if self.head is None else self.head(list(features.values()))


def _detection(name: str) -> nn.Module:
    detector = _torchvision(name)
    if name.startswith("raft"):
        return detector
    return _Dense(detector, head=name.startswith(("retinanet", "fcos", "ssd")))


class _Sound(nn.Module):
    """A speech network that also wants to be told how long each sound is."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, sound: Tensor) -> Any:
        return self.network(sound, torch.full((sound.shape[0],), sound.shape[-1]))


def _pytorchcv(name: str) -> nn.Module:
    from pytorchcv.model_provider import get_model

    options: dict[str, Any] = {"return_heatmap": True} if re.search("pose|centernet", name) else {}
    if re.search("_cityscapes|_celebamaskhq", name):
        options = {"in_size": (128, 128)}
    if re.match("jasper|quartznet", name):
        return _Sound(get_model(name, pretrained=False, from_audio=False))
    try:
        model = get_model(name, pretrained=False, **options)
    except TypeError:  # not every pose network can give its heat map
        model = get_model(name, pretrained=False)
    for module in model.modules():
        if isinstance(getattr(module, "final_pool", None), nn.AvgPool2d):
            module.final_pool = nn.AdaptiveAvgPool2d(1)  # the same for a large image, and small ones can be run too
    return model


def _smp(name: str) -> nn.Module:
    import segmentation_models_pytorch as smp

    architecture, encoder = name.split("/")
    return getattr(smp, architecture)(encoder, encoder_weights=None, classes=4)


# Configurations where the default is too large for a quick test or has no convolutions of its own.
CONFIGS: dict[str, dict[str, Any]] = {
    "ResNetForImageClassification": {"depths": [2, 2, 2, 2]},
    "RegNetForImageClassification": {"depths": [1, 2, 3, 2], "hidden_sizes": [64, 128, 256, 512], "groups_width": 16},
    "BitForImageClassification": {
        "depths": [2, 2, 2, 2],
        "hidden_sizes": [64, 128, 256, 512],
        "embedding_size": 32,
        "num_groups": 8,
    },
    "EfficientNetForImageClassification": {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    "ConvNextBackbone": {"depths": [2, 2, 2, 2], "hidden_sizes": [48, 96, 192, 384]},
    "UperNetForSemanticSegmentation": {"hidden_size": 64, "auxiliary_channels": 32},
    "SegformerForSemanticSegmentation": {"decoder_hidden_size": 64},
}


def _transformers(name: str) -> nn.Module:
    """A model class by its name, with its default configuration; parts of audio models by the part's name."""
    import transformers

    parts = {
        "Wav2Vec2FeatureEncoder": ("wav2vec2", "Wav2Vec2Config"),
        "HubertFeatureEncoder": ("hubert", "HubertConfig"),
        "EncodecEncoder": ("encodec", "EncodecConfig"),
        "EncodecDecoder": ("encodec", "EncodecConfig"),
        "DacEncoder": ("dac", "DacConfig"),
        "DacDecoder": ("dac", "DacConfig"),
        "MimiEncoder": ("mimi", "MimiConfig"),
        "VitsHifiGan": ("vits", "VitsConfig"),
        "VanModel": ("deprecated.van", "VanConfig"),
    }
    if name in parts:
        package, config = parts[name]
        module = importlib.import_module(f"transformers.models.{package}.modeling_{package.split('.')[-1]}")
        return getattr(module, name)(getattr(transformers, config)())
    cls = getattr(transformers, name)
    options = CONFIGS.get(name, {})
    if name == "UperNetForSemanticSegmentation":
        stages = [f"stage{i}" for i in (1, 2, 3, 4)]
        backbone = transformers.ConvNextConfig(**CONFIGS["ConvNextBackbone"], out_features=stages)
        options = options | {"backbone_config": backbone}
    if name.endswith("Backbone"):
        options = options | {"out_features": ["stage2", "stage4"]}
    return cls(cls.config_class(**options))


def _ultralytics(name: str) -> nn.Module:
    import ultralytics.nn.tasks as tasks
    from ultralytics.utils import LOGGER

    LOGGER.setLevel("ERROR")
    kinds = {"-cls": tasks.ClassificationModel, "-seg": tasks.SegmentationModel, "-pose": tasks.PoseModel}
    kinds |= {"-obb": tasks.OBBModel}
    kind = next((model for suffix, model in kinds.items() if suffix in name), tasks.DetectionModel)
    model: nn.Module = kind(f"{name}.yaml", verbose=False)
    return model


def _spandrel(name: str) -> nn.Module:
    """The first network of an architecture, with its defaults."""
    module = importlib.import_module(f"spandrel.architectures.{name}")
    cls = next(c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, nn.Module))
    wanted: dict[str, Any] = {"dim": 36, "num_in_ch": 3, "num_out_ch": 3}
    options = {
        n: wanted[n] for n, p in inspect.signature(cls).parameters.items() if n in wanted and p.default is p.empty
    }
    return cls(**options)


def _monai(name: str) -> tuple[nn.Module, list[Shapes]]:
    from coverage_monai import MONAI

    make, shapes = MONAI[name]
    return make(), shapes


def _own(name: str) -> tuple[nn.Module, list[Shapes]]:
    import coverage_own_shapes  # noqa: F401
    from coverage_own import OWN

    cls, shapes = OWN[name]
    return cls(), [shapes]


def _fresh(name: str) -> tuple[nn.Module, list[Shapes]]:
    import coverage_fresh_parts  # noqa: F401
    import coverage_fresh_shapes  # noqa: F401
    from coverage_fresh import FRESH

    cls, shapes = FRESH[name]
    return cls(), [shapes]


CREATORS: dict[str, Callable[[str], Any]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "tv-segmentation": _torchvision,
    "tv-video": _torchvision,
    "tv-detection": _detection,
    "pytorchcv": _pytorchcv,
    "smp": _smp,
    "transformers": _transformers,
    "ultralytics": _ultralytics,
    "monai": _monai,
    "spandrel": _spandrel,
    "own": _own,
    "fresh": _fresh,
}


def versions(names: Iterable[str]) -> dict[str, str]:
    """The version of every package that ``names`` need."""
    from importlib import metadata

    packages = {PACKAGES[name.partition(":")[0]] for name in names} - {"coverage_own", "coverage_fresh"}
    return {package: metadata.version(package) for package in sorted(packages)}
