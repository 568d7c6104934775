"""The networks of the coverage benchmark: ``python benchmarks/coverage_list.py`` writes coverage_unseen.txt anew.

coverage_models.txt, the smallest variant of every family of timm's CNN modules and torchvision's classification CNNs,
was the list while tracing was written, and stays as it was. coverage_unseen.txt are networks that had no part in that:
chosen by rule from the registries of other packages before bcnet was run on any of them. coverage_fresh.txt are more of
these, added when all of the others had been cured: networks written by hand and networks of further packages.
"""

from __future__ import annotations

from pathlib import Path

import coverage_zoos  # noqa: F401  (lets torchvision be imported)
import torch

HERE = Path(__file__).parent
SEEN, UNSEEN, LATER = (HERE / f"coverage_{name}.txt" for name in ("models", "unseen", "fresh"))
LARGEST = 70_000_000  # parameters
LEFT_OUT = {  # modules of pytorchcv, with the reason
    "jasper": "has more parameters than that",
    "jasperdr": "has more parameters than that",
    "ntsnet_cub": "crops its input where its own scores are highest",
    "pfpcnet": "takes images of one size only, which is not documented",
    "voca": "takes a person's number besides the sound",
    "nvpattexp": "takes a state of emotion besides the sound",
    "visemenet": "a recurrent network without convolutions",
    "propainter": "takes frames, masks and flows",
    "propainter_ip": "takes frames, masks and flows",
    "propainter_rfc": "takes frames, masks and flows",
}

# The hybrids of timm with convolutional stages, none of which is among the modules of coverage_models.txt.
TIMM = """
levit_128s levit_conv_128s efficientformer_l1 efficientformerv2_s0 efficientvit_b0 efficientvit_m0 mobilevit_xxs
mobilevitv2_050 nextvit_small pvt_v2_b0 shvit_s1 swiftformer_xs visformer_tiny tiny_vit_5m_224 coatnet_pico_rw_224
coat_lite_tiny iformer_t csatv2 lowformer_b0 cpubone_nano efficientvim_m1
mobilenetv5_base features/resnet18 features/mobilenetv3_small_050 features/hrnet_w18_small features/convnext_atto
features/efficientnet_b0 features/regnetx_002 features/densenet121 features/vgg11
"""
SEGMENTATION = "fcn_resnet50 deeplabv3_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large"
VIDEO = "r3d_18 mc3_18 r2plus1d_18 s3d"
DETECTION = """
fasterrcnn_resnet50_fpn fasterrcnn_resnet50_fpn_v2 fasterrcnn_mobilenet_v3_large_fpn maskrcnn_resnet50_fpn
keypointrcnn_resnet50_fpn retinanet_resnet50_fpn retinanet_resnet50_fpn_v2 fcos_resnet50_fpn ssd300_vgg16
ssdlite320_mobilenet_v3_large raft_small
"""
SMP = """
Unet/resnet18 Unet/mobilenet_v2 Unet/efficientnet-b0 Unet/vgg11_bn Unet/densenet121 Unet/se_resnet50
Unet/timm-regnetx_002 Unet/mobileone_s0 Unet/mit_b0 Unet/resnext50_32x4d Unet/dpn68 Unet/inceptionv4 Unet/xception
Unet/timm-skresnet18 UnetPlusPlus/resnet18 UnetPlusPlus/mobilenet_v2 MAnet/resnet18 MAnet/mobilenet_v2 Linknet/resnet18
Linknet/efficientnet-b0 FPN/resnet18 FPN/mobilenet_v2 PSPNet/resnet18 PSPNet/mobilenet_v2 PAN/resnet18 PAN/mobilenet_v2
DeepLabV3/resnet18 DeepLabV3/mobilenet_v2 DeepLabV3Plus/resnet18 DeepLabV3Plus/efficientnet-b0 UPerNet/resnet18
UPerNet/tu-convnext_atto Segformer/mit_b0 Segformer/resnet18 Unet/tu-mobilenetv3_small_050 Unet/tu-resnest14d
"""
TRANSFORMERS = """
ResNetForImageClassification RegNetForImageClassification ConvNextForImageClassification
ConvNextV2ForImageClassification MobileNetV1ForImageClassification MobileNetV2ForImageClassification
MobileNetV2ForSemanticSegmentation MobileViTForImageClassification MobileViTForSemanticSegmentation
MobileViTV2ForImageClassification MobileViTV2ForSemanticSegmentation EfficientNetForImageClassification
PoolFormerForImageClassification BitForImageClassification LevitForImageClassification CvtForImageClassification
PvtForImageClassification PvtV2ForImageClassification SegformerForImageClassification SegformerForSemanticSegmentation
FocalNetForImageClassification SwiftFormerForImageClassification TextNetForImageClassification
HGNetV2ForImageClassification PPLCNetForImageClassification UperNetForSemanticSegmentation GLPNForDepthEstimation
ResNetBackbone ConvNextBackbone BitBackbone HGNetV2Backbone RTDetrResNetBackbone DINOv3ConvNextBackbone
Wav2Vec2FeatureEncoder HubertFeatureEncoder EncodecEncoder EncodecDecoder DacEncoder DacDecoder MimiEncoder VitsHifiGan
SpeechT5HifiGan FastSpeech2ConformerHifiGan
"""
ULTRALYTICS = """
yolov3-tiny yolov5n yolov6n yolov8n yolov8n-seg yolov8n-pose yolov8n-cls yolov8n-obb yolov8n-ghost yolov8n-p2 yolov9t
yolov9s yolov10n yolo11n yolo11n-seg yolo11n-pose yolo11n-cls yolo11n-obb yolo12n yolo12n-cls yolo26n yolo26n-seg
yolo26n-pose yolo26n-cls
"""
# Networks that restore images, added later than the others: the convolutional architectures of
# spandrel of at most 300 modules.
SPANDREL = "Compact DnCNN HVICIDNet MixDehazeNet MoSR NAFNet OmniSR RealCUGAN SAFMN SPAN SwiftSRGAN"


def pytorchcv() -> list[str]:
    """The smallest variant of every module of pytorchcv; networks for ImageNet and CIFAR are in modules apart."""
    from pytorchcv.model_provider import _models

    modules: dict[str, list[str]] = {}
    for name, make in _models.items():
        modules.setdefault(make.__module__.rpartition(".")[2], []).append(name)
    chosen = []
    for module, names in modules.items():
        if module in LEFT_OUT or module.endswith("_cub"):
            continue
        with torch.device("meta"):
            sizes = {name: _size(_models[name]) for name in names}
        smallest = min(sizes, key=lambda name: (sizes[name], len(name)))
        if sizes[smallest] <= LARGEST:
            chosen.append(smallest)
    return chosen


def _size(make: object) -> int:
    try:
        return sum(p.numel() for p in make(pretrained=False).parameters())  # type: ignore[operator]
    except Exception:  # a network that cannot be made without memory is as large as can be
        return LARGEST


def unseen() -> list[str]:
    """``zoo:NAME`` of all networks that had no part in the making."""
    import coverage_own_shapes  # noqa: F401
    from coverage_monai import MONAI
    from coverage_own import OWN

    zoos = {
        "own": OWN,
        "monai": MONAI,
        "tv-segmentation": SEGMENTATION.split(),
        "tv-video": VIDEO.split(),
        "tv-detection": DETECTION.split(),
        "ultralytics": ULTRALYTICS.split(),
        "smp": SMP.split(),
        "transformers": TRANSFORMERS.split(),
        "timm": TIMM.split(),
        "pytorchcv": pytorchcv(),
        "spandrel": SPANDREL.split(),
    }
    return [f"{zoo}:{name}" for zoo, names in zoos.items() for name in names]


def fresh() -> list[str]:
    """``zoo:NAME`` of the networks that were added last."""
    import coverage_fresh_parts  # noqa: F401
    import coverage_fresh_shapes  # noqa: F401
    from coverage_fresh import FRESH
    from coverage_fresh_zoos import PLACES

    return [*(f"fresh:{name}" for name in FRESH), *PLACES]


if __name__ == "__main__":
    LATER.write_text("\n".join(fresh()) + "\n")
    UNSEEN.write_text("\n".join(unseen()) + "\n")
