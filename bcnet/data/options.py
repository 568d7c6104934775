"""How data is loaded and augmented: a small frozen object that survives a round trip through JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from bcnet.utils.settings import Count, Flag, Natural, checked


@checked
class LoadOptions:
    """Loading and augmentation. For a folder of images, any ``crop`` above 0 means the usual random resized crop, and 0
    the centre crop."""

    batch_size: Annotated[Count, "images of a training step, over all processes"] = 256
    eval_batch_size: Annotated[Count, "the most images of a validation or test batch"] = 2048
    crop: Annotated[Natural | None, "pixels of padding before a random crop; left out: the data's own"] = None
    flip: Annotated[Flag | None, "whether half of the images are mirrored; left out: the data's own"] = None
    cutout: Annotated[Natural, "the side of a random square that is blanked; 0: none"] = 0
    channels_last: Annotated[Flag, "whether batches come with channels innermost"] = False
    image_size: Annotated[Count, "height and width that images of a folder are resized to"] = 224
    channels: Annotated[Literal[1, 3], "3 for colour, 1 for grey, of a folder of images"] = 3
    workers: Annotated[Natural, "processes that load a folder of images"] = 4
