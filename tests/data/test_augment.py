"""Crops and flips: equal to a loop over samples, and a function of (seed, epoch, sample) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.data import Augment
from slipstream.data.streams import Purpose, random_integers
from slipstream.errors import DataError


def reference(augment: Augment, images: Tensor, samples: Tensor, seed: int, epoch: int) -> Tensor:
    """One sample after the other, one step after the other."""

    def draw(high: int, purpose: Purpose, sample: int) -> int:
        at = np.array([sample])
        return int(random_integers(high, seed=seed, purpose=purpose, epoch=epoch, samples=at)[0])

    results = []
    border = augment.crop_padding
    for image, sample in zip(images, samples.tolist(), strict=True):
        channels, height, width = image.shape
        padded = torch.zeros(channels, height + 2 * border, width + 2 * border, dtype=torch.uint8)
        padded[:, border : border + height, border : border + width] = image
        row = draw(2 * border + 1, Purpose.CROP_ROW, sample)
        column = draw(2 * border + 1, Purpose.CROP_COLUMN, sample)
        result = padded[:, row : row + height, column : column + width]
        if augment.horizontal_flip and draw(2, Purpose.FLIP, sample):
            result = result.flip(-1)
        results.append(result)
    return torch.stack(results)


@given(
    padding=st.integers(0, 3),
    flip=st.booleans(),
    channels=st.sampled_from([1, 3]),
    count=st.integers(1, 9),
    epoch=st.integers(0, 3),
)
@settings(deadline=None)
def test_the_vectorised_form_equals_the_loop(
    padding: int, flip: bool, channels: int, count: int, epoch: int
) -> None:
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(1, 256, (count, channels, 6, 5), dtype=torch.uint8, generator=generator)
    samples = torch.randperm(1000, generator=generator)[:count]
    before = images.clone()
    augment = Augment(padding, flip)
    result = augment.apply(images, samples, seed=7, epoch=epoch)
    assert result.dtype == torch.uint8
    assert torch.equal(result, reference(augment, images, samples, 7, epoch))
    assert torch.equal(images, before)
    assert result.data_ptr() != images.data_ptr()


def test_a_sample_gets_the_same_in_whatever_batch_it_comes() -> None:
    images = torch.randint(0, 256, (32, 1, 8, 8), dtype=torch.uint8)
    samples = torch.arange(32)
    augment = Augment(2, True)
    together = augment.apply(images, samples, seed=3, epoch=1)
    shuffled = torch.randperm(32)
    apart = augment.apply(images[shuffled], samples[shuffled], seed=3, epoch=1)
    assert torch.equal(apart, together[shuffled])
    alone = augment.apply(images[5:6], samples[5:6], seed=3, epoch=1)
    assert torch.equal(alone[0], together[5])


def test_epochs_and_samples_differ_and_every_shift_occurs() -> None:
    image = torch.arange(1, 65, dtype=torch.uint8).reshape(1, 1, 8, 8)
    images = image.expand(2000, 1, 8, 8).contiguous()
    samples = torch.arange(2000)
    augment = Augment(1, True)
    first = augment.apply(images, samples, seed=0, epoch=0)
    assert len(torch.unique(first, dim=0)) == 3 * 3 * 2
    assert not torch.equal(first, augment.apply(images, samples, seed=0, epoch=1))
    assert not torch.equal(first, augment.apply(images, samples, seed=1, epoch=0))
    assert torch.equal(first, augment.apply(images, samples, seed=0, epoch=0))


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(DataError, match="crop_padding is -1"):
        Augment(-1)
    with pytest.raises(DataError, match="crop_padding is 5 but the images are 8 x 5"):
        Augment(5).check_size(8, 5)
    Augment(4).check_size(8, 5)
