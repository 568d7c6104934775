"""Handwritten digits, the embedded default: 1,797 grey images of 8 x 8 pixels with values 0..16, ten classes.

``digits.npz`` holds the set of scikit-learn's ``load_digits``, the test part of the "Optical Recognition of
Handwritten Digits" data by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, CC BY 4.0). It has no
training and test parts of its own: a fifth of every class, always the same images, is the test set here.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from bcnet.data.source import ImageSet, Labelled, split


def read_digits() -> ImageSet:
    """1,438 training and 359 test images (n, 1, 8, 8)."""
    with files("bcnet.data").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = arrays["images"][:, None], arrays["labels"].astype(np.int64)
    train, test = split(labels, fraction=0.2, seed=0)
    return ImageSet(
        train=Labelled(images[train], labels[train]),
        test=Labelled(images[test], labels[test]),
        classes=10,
        mean=(4.884,),
        std=(6.017,),
        crop=1,
        flip=False,
    )
