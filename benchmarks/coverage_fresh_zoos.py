"""Networks of packages that bcnet was never tried on before: ``package:NAME`` is how it is made and what it takes.

The list was written before bcnet was run on any of them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[str, dict[str, Any], tuple[tuple[int, ...], ...]]
IMAGE, SMALL, PATCH = ((3, 64, 64),), ((3, 32, 32),), ((1, 32, 32),)
DIFFUSERS = {"block_out_channels": (32, 64), "norm_num_groups": 8}
DOWN, UP = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
TINY = {"n_resgroups": 2, "n_resblocks": 2, "n_feats": 32}

PLACES: dict[str, Made] = {
    "kornia:HardNet": ("kornia.feature", {"pretrained": False}, PATCH),
    "kornia:HyNet": ("kornia.feature", {"pretrained": False}, PATCH),
    "kornia:SOSNet": ("kornia.feature", {"pretrained": False}, PATCH),
    "kornia:TFeat": ("kornia.feature", {"pretrained": False}, PATCH),
    "kornia:DISK": ("kornia.feature", {}, IMAGE),
    "kornia:RRDBNet": (
        "kornia.models",
        {"num_in_ch": 3, "num_out_ch": 3, "num_feat": 32, "num_block": 2, "num_grow_ch": 16},
        SMALL,
    ),
    "facenet_pytorch:InceptionResnetV1": ("facenet_pytorch", {"classify": True, "num_classes": 10}, ((3, 96, 96),)),
    "geffnet:mnasnet_a1": ("geffnet", {}, IMAGE),
    "geffnet:fbnetc_100": ("geffnet", {}, IMAGE),
    "geffnet:tf_mixnet_s": ("geffnet", {}, IMAGE),
    "geffnet:tf_mobilenetv3_small_minimal_100": ("geffnet", {}, IMAGE),
    "geffnet:tf_efficientnet_cc_b0_4e": ("geffnet", {}, IMAGE),
    "efficientnet_pytorch:EfficientNet": ("efficientnet_pytorch", {"from_name": "efficientnet-b0"}, IMAGE),
    "pretrainedmodels:bninception": ("pretrainedmodels", {"pretrained": None}, ((3, 224, 224),)),
    "pretrainedmodels:cafferesnet101": ("pretrainedmodels", {"pretrained": None}, ((3, 224, 224),)),
    "pretrainedmodels:inceptionresnetv2": ("pretrainedmodels", {"pretrained": None}, ((3, 299, 299),)),
    "pretrainedmodels:nasnetamobile": ("pretrainedmodels", {"pretrained": None}, ((3, 224, 224),)),
    "pretrainedmodels:resnext101_32x4d": ("pretrainedmodels", {"pretrained": None}, ((3, 224, 224),)),
    "pretrainedmodels:se_resnext50_32x4d": ("pretrainedmodels", {"pretrained": None}, ((3, 224, 224),)),
    "resnest:resnest50_fast_2s2x40d": ("resnest.torch", {}, IMAGE),
    "resnest:resnest50_fast_4s1x64d": ("resnest.torch", {}, IMAGE),
    "pytorchvideo:create_x3d": (
        "pytorchvideo.models.x3d",
        {"input_clip_length": 4, "input_crop_size": 64, "model_num_class": 10},
        ((3, 4, 64, 64),),
    ),
    "pytorchvideo:create_csn": (
        "pytorchvideo.models.csn",
        {"model_depth": 50, "model_num_class": 10, "head_pool_kernel_size": (1, 2, 2)},
        ((3, 8, 64, 64),),
    ),
    "vit_pytorch:MobileViT": (
        "vit_pytorch.mobile_vit",
        {"image_size": (64, 64), "dims": [32, 40, 48], "channels": [16, 16, 24, 24, 32, 32, 40, 40, 48, 48, 96]}
        | {"num_classes": 10},
        IMAGE,
    ),
    "vit_pytorch:CvT": ("vit_pytorch.cvt", {"num_classes": 10, "s3_depth": 2}, IMAGE),
    "vit_pytorch:MaxViT": (
        "vit_pytorch.max_vit",
        {"num_classes": 10, "dim_conv_stem": 32, "dim": 32, "dim_head": 16, "depth": (1, 1), "window_size": 4},
        IMAGE,
    ),
    "vit_pytorch:NesT": (
        "vit_pytorch.nest",
        {"image_size": 64, "patch_size": 4, "dim": 24, "heads": 2, "num_hierarchies": 3, "block_repeats": (1, 1, 2)}
        | {"num_classes": 10},
        IMAGE,
    ),
    "denoising_diffusion_pytorch:Unet": ("denoising_diffusion_pytorch", {"dim": 16, "dim_mults": (1, 2)}, SMALL),
    "x_unet:XUnet": ("x_unet", {"dim": 16}, SMALL),
    "diffusers:UNet2DModel": (
        "diffusers",
        DIFFUSERS
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        SMALL,
    ),
    "diffusers:AutoencoderKL": ("diffusers", DIFFUSERS | {"down_block_types": DOWN, "up_block_types": UP}, SMALL),
    "diffusers:VQModel": ("diffusers", DIFFUSERS | {"down_block_types": DOWN, "up_block_types": UP}, SMALL),
    "diffusers:AutoencoderTiny": ("diffusers", {}, SMALL),
    "pytorch_tcn:TCN": ("pytorch_tcn", {"num_inputs": 8, "num_channels": [16, 24]}, ((8, 32),)),
    "lightly:ResNetGenerator": ("lightly.models", {"name": "resnet-9"}, SMALL),
    "super_image:EdsrModel": ("super_image", {"n_resblocks": 4, "n_feats": 32}, SMALL),
    "super_image:MsrnModel": ("super_image", {"n_blocks": 2, "n_feats": 32}, SMALL),
    "super_image:PanModel": ("super_image", {}, SMALL),
    "super_image:A2nModel": ("super_image", {}, SMALL),
    "super_image:CarnModel": ("super_image", {}, SMALL),
    "super_image:AwsrnModel": ("super_image", {}, SMALL),
    "super_image:DdbpnModel": ("super_image", {}, SMALL),
    "super_image:RcanModel": ("super_image", TINY, SMALL),
    "super_image:MdsrModel": ("super_image", {"n_resblocks": 4, "n_feats": 32}, SMALL),
    "super_image:DrnModel": ("super_image", {}, SMALL),
}


class _AtStep(nn.Module):
    """A diffusion network that also wants to be told the step of every image."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Any:
        return self.network(image, torch.full((image.shape[0],), 7))


def make(name: str) -> tuple[nn.Module, list[tuple[tuple[int, ...], ...]]]:
    """The network ``package:NAME`` and the shapes of its inputs."""
    place, options, shapes = PLACES[name]
    package, _, own = name.partition(":")
    found: Any = getattr(importlib.import_module(place), own)
    if "from_name" in options:
        network = found.from_name(**{"model_name": options["from_name"]})
    elif package == "super_image":
        configuration = getattr(importlib.import_module(place), own.replace("Model", "Config"))
        network = found(configuration(scale=2, bam=False, **options))
    else:
        network = found(**options)
    stepped = own in ("Unet", "UNet2DModel")
    return _AtStep(network) if stepped else network, [shapes]
