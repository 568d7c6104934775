"""A slim network as the backbone of torchvision's detectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.utils.modes import evaluation_mode

if TYPE_CHECKING:
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

STAGES = ("layer2", "layer3", "layer4")
"""The stages of a torchvision ResNet that detectors look at, as RetinaNet does."""


def detection_backbone(
    network: nn.Module, example: Tensor, stages: Sequence[str] = STAGES, channels: int = 256
) -> BackboneWithFPN:
    """``network``, at any widths, with a feature pyramid of ``channels`` over its ``stages``.

    ``stages`` are children of ``network``, each of which feeds the next, as in torchvision's ResNets; ``example``
    (n, C, H, W) tells how many channels each has. RetinaNet and Faster R-CNN take what is returned::

        RetinaNet(detection_backbone(slim, torch.zeros(1, 3, 64, 64)), num_classes=91)
    """
    try:
        from torchvision.models._utils import IntermediateLayerGetter
        from torchvision.models.detection.backbone_utils import BackboneWithFPN
    except ImportError:
        raise BcnetError("a backbone of torchvision's detectors needs torchvision: pip install torchvision") from None
    children = dict(network.named_children())
    missing = [name for name in stages if name not in children]
    if missing or not stages:
        names = ", ".join(children)
        raise BcnetError(f"the network has no stage {(missing or [''])[0]!r:.40}: name some of its children ({names})")
    returned = {name: str(number) for number, name in enumerate(stages)}
    body = IntermediateLayerGetter(network, returned)
    with torch.no_grad(), evaluation_mode(body):
        features = body(example)
    return BackboneWithFPN(network, returned, [x.shape[1] for x in features.values()], channels)
