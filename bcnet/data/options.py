"""How data is loaded and augmented: one small frozen object that survives a JSON round trip."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from bcnet.errors import BcnetError


@dataclass(frozen=True)
class LoadOptions:
    """Loading and augmentation; ``None`` means the data set's own choice.

    ``batch_size``: images in a training step, over all processes together.
    ``eval_batch_size``: the most images in a validation or test batch (the paper scores in batches of 2048).
    ``crop``: pixels of black padding before a random crop of the image's own size; for image folders any
    number above 0 stands for the usual random resized crop and 0 for the centre crop.
    ``flip``: mirror half of the images. ``cutout``: side of a random square set to the mean, 0 for none.
    ``image_size``, ``channels`` (3 colour, 1 grey) and ``workers`` (loading processes) are for image folders.
    """

    batch_size: int = 256
    eval_batch_size: int = 2048
    crop: int | None = None
    flip: bool | None = None
    cutout: int = 0
    channels_last: bool = False
    image_size: int = 224
    channels: int = 3
    workers: int = 4

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "eval_batch_size": 1, "crop": 0, "cutout": 0, "image_size": 1, "workers": 0}
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if value is None and field.name in ("crop", "flip"):
                continue
            if field.name in ("flip", "channels_last"):
                if not isinstance(value, bool):
                    raise BcnetError(f"{field.name} must be true or false, got {value!r:.40}")
            elif not isinstance(value, int) or isinstance(value, bool):
                raise BcnetError(f"{field.name} must be a whole number, got {value!r:.40}")
            elif value < least.get(field.name, value):
                raise BcnetError(f"{field.name} is {value}, but it must be at least {least[field.name]}")
        if self.channels not in (1, 3):
            raise BcnetError(f"channels is {self.channels}, but image folders are read in 3 (colour) or 1 (grey)")
