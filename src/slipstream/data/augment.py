"""Random crops and flips, each a pure function of (seed, epoch, sample index)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.data.streams import Purpose, random_integers
from slipstream.errors import DataError


@dataclass(frozen=True)
class Augment:
    """Random shift and mirror image of each sample, drawn anew in every epoch.

    `crop_padding`: pixels of black border on each side, out of which a window of the original
    size is cut at a random place; 0 turns it off. `horizontal_flip`: mirrors each sample with
    probability one half.

    What a sample gets depends on (seed, epoch, sample index) alone: neither the rank, nor the
    batch it is in, nor a resumed run changes it.
    """

    crop_padding: int = 0
    horizontal_flip: bool = False

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise DataError(f"crop_padding is {self.crop_padding}: it must be 0 or more pixels")

    def check_size(self, height: int, width: int) -> None:
        """Raises DataError when the border could push a whole image out of its window."""
        if self.crop_padding >= min(height, width):
            raise DataError(
                f"crop_padding is {self.crop_padding} but the images are {height} x {width} pixels:"
                f" choose a value below {min(height, width)}"
            )

    def apply(self, images: Tensor, samples: Tensor, *, seed: int, epoch: int) -> Tensor:
        """Augmented copy of `images`: uint8 [B, C, H, W] -> new uint8 [B, C, H, W].

        `samples` (int64 [B]) are the indices of the images in their data set. The input is left
        as it is. Runs in NumPy on the calling thread alone, for the reason that `normalise` gives.
        """
        pixels, indices = images.numpy(), samples.numpy()
        if self.crop_padding:
            pixels = self._crop(pixels, indices, seed, epoch)
        else:
            pixels = pixels.copy()
        if self.horizontal_flip:
            flipped = random_integers(
                2, seed=seed, purpose=Purpose.FLIP, epoch=epoch, samples=indices
            ).astype(bool)
            pixels[flipped] = pixels[flipped][..., ::-1]
        return torch.from_numpy(pixels)

    def _crop(
        self, pixels: NDArray[np.uint8], indices: NDArray[np.int64], seed: int, epoch: int
    ) -> NDArray[np.uint8]:
        height, width = pixels.shape[2:]
        border = (self.crop_padding, self.crop_padding)
        padded = np.pad(pixels, ((0, 0), (0, 0), border, border))
        places = 2 * self.crop_padding + 1
        rows = random_integers(
            places, seed=seed, purpose=Purpose.CROP_ROW, epoch=epoch, samples=indices
        )
        columns = random_integers(
            places, seed=seed, purpose=Purpose.CROP_COLUMN, epoch=epoch, samples=indices
        )
        # [B, C, places, places, H, W] without copying; the index then copies one window a sample.
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        return windows[np.arange(len(indices)), :, rows, columns]
