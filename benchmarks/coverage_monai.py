"""MONAI's networks in small, for 1-D signals, 2-D images and 3-D volumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import monai.networks.nets as nets
from torch import nn

Shapes = tuple[tuple[int, ...], ...]
SIDES = {1: (256,), 2: (64,), 3: (16, 32)}  # to try in turn
MONAI: dict[str, tuple[Callable[[], nn.Module], list[Shapes]]] = {}


class _Judgement(nets.PatchDiscriminator):
    """A discriminator that gives its judgement alone: where every layer is an output, nothing can vary."""

    def forward(self, x: Any) -> Any:
        return super().forward(x)[-1]


def _add(name: str, cls: Any, d: int, shape: tuple[int, ...] | None = None, **options: Any) -> None:
    """``name`` is ``cls`` with ``options``, on ``shape`` or an image of one channel and ``d`` dimensions."""
    images: list[Shapes] = [((1, *[side] * d),) for side in SIDES[d]]
    MONAI[name] = (lambda: cls(**options), [(shape,)] if shape else images)


for _d in (1, 2, 3):
    _io = {"spatial_dims": _d, "in_channels": 1, "out_channels": 3}
    _small = {"channels": (16, 32, 64), "strides": (2, 2)}
    _add(f"UNet-{_d}d", nets.UNet, _d, **_io, **_small, num_res_units=2)
    _add(f"BasicUNet-{_d}d", nets.BasicUNet, _d, **_io, features=(16, 16, 32, 64, 128, 16))
    _add(f"DenseNet121-{_d}d", nets.DenseNet121, _d, **_io)
    _add(f"SEResNet50-{_d}d", nets.SEResNet50, _d, spatial_dims=_d, in_channels=1, num_classes=3)
    _add(f"EfficientNetBN-{_d}d", nets.EfficientNetBN, _d, model_name="efficientnet-b0", pretrained=False,
         spatial_dims=_d, in_channels=1, num_classes=3)  # fmt: skip
    _resnet = {"spatial_dims": _d, "n_input_channels": 1, "num_classes": 3}
    _add(f"ResNet10-{_d}d", nets.resnet10, _d, **_resnet)
for _d in (2, 3):
    _io = {"spatial_dims": _d, "in_channels": 1, "out_channels": 3}
    _add(f"AttentionUnet-{_d}d", nets.AttentionUnet, _d, **_io, channels=(16, 32, 64), strides=(2, 2))
    _add(f"BasicUNetPlusPlus-{_d}d", nets.BasicUNetPlusPlus, _d, **_io, features=(8, 8, 16, 32, 64, 8))
    _add(f"DynUNet-{_d}d", nets.DynUNet, _d, **_io, kernel_size=[3] * 4, strides=[1, 2, 2, 2],
         upsample_kernel_size=[2, 2, 2], filters=[8, 16, 32, 64])  # fmt: skip
    _add(f"DynUNetDeep-{_d}d", nets.DynUNet, _d, **_io, kernel_size=[3] * 4, strides=[1, 2, 2, 2], res_block=True,
         upsample_kernel_size=[2, 2, 2], filters=[8, 16, 32, 64], deep_supervision=True)  # fmt: skip
    _add(f"SegResNet-{_d}d", nets.SegResNet, _d, **_io, init_filters=8)
    _add(f"VNet-{_d}d", nets.VNet, _d, **_io)
    _add(f"SegResNetDS-{_d}d", nets.SegResNetDS, _d, **_io, init_filters=8, blocks_down=(1, 2, 2), dsdepth=2)
    _add(f"HighResNet-{_d}d", nets.HighResNet, _d, **_io)
    _add(f"MedNeXt-{_d}d", nets.MedNeXt, _d, **_io, init_filters=8, encoder_expansion_ratio=2,
         decoder_expansion_ratio=2, bottleneck_expansion_ratio=2)  # fmt: skip
    _add(f"SEResNeXt50-{_d}d", nets.SEResNext50, _d, spatial_dims=_d, in_channels=1, num_classes=3)
    _add(f"ResNet50-{_d}d", nets.resnet50, _d, spatial_dims=_d, n_input_channels=1, num_classes=3)
    _add(f"AutoEncoder-{_d}d", nets.AutoEncoder, _d, **_io, channels=(8, 16, 32), strides=(2, 2, 2))
    _add(f"AutoencoderKL-{_d}d", nets.AutoencoderKL, _d, **_io, channels=(16, 32), num_res_blocks=(1, 1),
         attention_levels=(False, False), norm_num_groups=8, with_encoder_nonlocal_attn=False,
         with_decoder_nonlocal_attn=False)  # fmt: skip
    _add(f"VQVAE-{_d}d", nets.VQVAE, _d, **_io, channels=(16, 32), num_res_channels=16, num_res_layers=1,
         downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
         upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)))  # fmt: skip
    _add(f"PatchDiscriminator-{_d}d", _Judgement, _d, spatial_dims=_d, channels=16, in_channels=1)
    _add(f"VoxelMorphUNet-{_d}d", nets.VoxelMorphUNet, _d, (2, *[32] * _d), spatial_dims=_d, in_channels=2,
         unet_out_channels=16, channels=(8, 16, 16, 16, 16, 8), final_conv_channels=(8,))  # fmt: skip
    _add(f"RegUNet-{_d}d", nets.RegUNet, _d, spatial_dims=_d, in_channels=1, num_channel_initial=8, depth=2)
    _add(f"LocalNet-{_d}d", nets.LocalNet, _d, spatial_dims=_d, in_channels=1, num_channel_initial=8,
         extract_levels=(0, 1, 2))  # fmt: skip
_add("AHNet-3d", nets.AHNet, 3, spatial_dims=3, upsample_mode="trilinear", in_channels=1, out_channels=2,
     layers=(1, 1, 1, 1), psp_block_num=0)  # fmt: skip
_add("SegResNetVAE-3d", nets.SegResNetVAE, 3, input_image_size=(32, 32, 32), in_channels=1, out_channels=2,
     init_filters=8)  # fmt: skip
_add("Quicknat-2d", nets.Quicknat, 2, num_classes=3, num_channels=1, num_filters=16)
_add("FlexibleUNet-2d", nets.FlexibleUNet, 2, (3, 64, 64), in_channels=3, out_channels=2, backbone="efficientnet-b0")
_add("FlexibleUNetResNet-3d", nets.FlexibleUNet, 3, in_channels=1, out_channels=2, backbone="resnet10", spatial_dims=3)
_add("DAF3D", nets.DAF3D, 3, in_channels=1, out_channels=2)
_add("MILModel-2d", nets.MILModel, 2, (4, 3, 64, 64), num_classes=2, mil_mode="att", pretrained=False,
     backbone="resnet18")  # fmt: skip
_add("Classifier-2d", nets.Classifier, 2, in_shape=(1, 64, 64), classes=3, channels=(16, 32, 64), strides=(2, 2, 2))
_add("Regressor-3d", nets.Regressor, 3, in_shape=(1, 32, 32, 32), out_shape=(2,), channels=(8, 16, 32),
     strides=(2, 2, 2))  # fmt: skip
_add("Generator-2d", nets.Generator, 2, (16,), latent_shape=(16,), start_shape=(32, 8, 8), channels=(32, 16, 1),
     strides=(2, 2, 1))  # fmt: skip
_add("VarAutoEncoder-2d", nets.VarAutoEncoder, 2, spatial_dims=2, in_shape=(1, 64, 64), out_channels=1, latent_size=8,
     channels=(8, 16, 32), strides=(2, 2, 2))  # fmt: skip
_add("GlobalNet-2d", nets.GlobalNet, 2, image_size=[64, 64], spatial_dims=2, in_channels=1, num_channel_initial=8,
     depth=2)  # fmt: skip
_add("VISTA3DEncoder", lambda: nets.SegResNetDS2(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2,
     blocks_down=(1, 1, 1)), 3)  # fmt: skip
MONAI["DiffusionModelUNet-2d"] = (
    lambda: nets.DiffusionModelUNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(16, 32), num_res_blocks=1,
                                    attention_levels=(False, True), norm_num_groups=8, num_head_channels=8),
    [((1, 32, 32), ())],
)  # fmt: skip
