"""Handwritten digits, the embedded default: 1,797 grey images of 8 x 8 pixels with values 0..16, ten classes.

They come with scikit-learn, so nothing is downloaded. The set has no training and test parts of its own: a fifth
of every class, always the same images, is the test set here.
"""

from __future__ import annotations

import numpy as np

from bcnet.data.source import ImageSet, Labelled, split


def read_digits() -> ImageSet:
    """1,438 training and 359 test images (n, 1, 8, 8)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = found.images[:, None].astype(np.uint8), found.target.astype(np.int64)
    train, test = split(labels, fraction=0.2, seed=0)
    return ImageSet(
        train=Labelled(images[train], labels[train]),
        test=Labelled(images[test], labels[test]),
        classes=10,
        mean=(4.884,),
        std=(6.017,),
        crop=1,
        flip=False,
        names=tuple(map(str, range(10))),
        values="0 to 16",
    )
