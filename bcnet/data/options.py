"""How data is loaded and augmented: one small frozen object that survives a JSON round trip."""

from __future__ import annotations

from typing import Literal

from bcnet.utils.settings import Count, Flag, Natural, checked


@checked
class LoadOptions:
    """Loading and augmentation; ``None`` means the data set's own choice.

    ``batch_size``: images in a training step, over all processes together.
    ``eval_batch_size``: the most images in a validation or test batch (the paper scores in batches of 2048).
    ``crop``: pixels of black padding before a random crop of the image's own size; for image folders any
    number above 0 stands for the usual random resized crop and 0 for the centre crop.
    ``flip``: mirror half of the images. ``cutout``: side of a random square set to the mean, 0 for none.
    ``image_size``, ``channels`` (3 colour, 1 grey) and ``workers`` (loading processes) are for image folders.
    """

    batch_size: Count = 256
    eval_batch_size: Count = 2048
    crop: Natural | None = None
    flip: Flag | None = None
    cutout: Natural = 0
    channels_last: Flag = False
    image_size: Count = 224
    channels: Literal[1, 3] = 3
    workers: Natural = 4
