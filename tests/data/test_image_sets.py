"""Image sets: what they refuse, their statistics, and the digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slipstream.data import ImageSet, channel_statistics, load_images
from slipstream.errors import DataError

IMAGES = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
LABELS = torch.tensor([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": IMAGES.float()}, "uint8 tensor"),
        ({"images": IMAGES[:, 0]}, "uint8 tensor"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "non-empty"),
        ({"labels": LABELS[:3]}, r"int64 \[4\], one for each image"),
        ({"labels": LABELS.int()}, "int64"),
        ({"labels": LABELS + 1}, r"\[1, 2\], but it has 2 classes"),
        ({"labels": LABELS - 1}, r"\[-1, 0\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {"images": IMAGES, "labels": LABELS, **change}
    with pytest.raises(DataError, match=message):
        ImageSet("example", classes=("no", "yes"), **parts)


def test_its_length_is_the_number_of_images() -> None:
    assert len(ImageSet("example", IMAGES, LABELS, ("no", "yes"))) == 4


def test_statistics_equal_numpys_in_double_precision(
    image_set: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = image_set.images.numpy().astype(np.float64) / 255
    for piece in (7, 2**20):
        monkeypatch.setattr("slipstream.data.images._PIECE_PIXELS", piece)
        mean, std = channel_statistics(image_set)
        np.testing.assert_allclose(mean, scaled.mean((0, 2, 3)), rtol=1e-12)
        np.testing.assert_allclose(std, scaled.std((0, 2, 3)), rtol=1e-12)


def test_a_channel_without_variation_can_be_divided_by() -> None:
    images = torch.full((2, 1, 3, 3), 51, dtype=torch.uint8)
    mean, std = channel_statistics(ImageSet("flat", images, torch.zeros(2).long(), ("only",)))
    assert mean == pytest.approx((0.2,))
    assert std == (1.0,)


def test_digits_are_split_once_and_for_all() -> None:
    train, test = load_images("digits")
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape[1:] == test.images.shape[1:] == (1, 8, 8)
    assert train.name == "digits" and train.classes == tuple("0123456789")
    assert int(train.images.max()) == 255
    # Every class is well represented on both sides.
    assert int(train.labels.bincount().min()) >= 130
    assert int(test.labels.bincount(minlength=10).min()) >= 25
    again, _ = load_images("digits")
    assert torch.equal(train.images, again.images) and torch.equal(train.labels, again.labels)
    joined = torch.cat([train.images, test.images]).reshape(1797, -1).long().sum(1).sort().values
    from sklearn.datasets import load_digits

    pixels = np.rint(load_digits().images * (255 / 16)).sum((1, 2)).astype(np.int64)
    assert torch.equal(joined, torch.from_numpy(np.sort(pixels)))
