"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels that need no download."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.data.images import ImageSet
from slipstream.data.streams import Purpose, permutation

_NUM_TEST = 360
_BRIGHTEST = 16  # pixels of this set are counts from 0 to 16


def load_digits() -> tuple[ImageSet, ImageSet]:
    """(train, test): 1,437 and 360 images, uint8 [N, 1, 8, 8]; the split is fixed for ever."""
    # Imported here: scikit-learn takes over a second to import and only this function needs it.
    from sklearn.datasets import load_digits as load_from_sklearn

    data = load_from_sklearn()
    pixels = np.rint(data.images * (255 / _BRIGHTEST)).astype(np.uint8)[:, None]
    images = torch.from_numpy(pixels)
    labels = torch.from_numpy(data.target.astype(np.int64))
    classes = tuple(str(name) for name in data.target_names)
    # Neighbours are by the same writer and labels come in cycles: only a shuffled split is fair.
    order = torch.from_numpy(permutation(len(labels), seed=0, purpose=Purpose.SPLIT, epoch=0))
    test, train = order[:_NUM_TEST], order[_NUM_TEST:]
    return (
        ImageSet("digits", images[train], labels[train], classes),
        ImageSet("digits", images[test], labels[test], classes),
    )
