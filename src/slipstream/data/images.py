"""Image sets in memory, and the statistics and scaling that training needs from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import DataError

_PIECE_PIXELS = 2**20


@dataclass(frozen=True)
class ImageSet:
    """Labelled images that fit in memory; never written to after construction.

    `images` is uint8 [num_samples, channels, height, width] on the CPU, `labels` is int64
    [num_samples] with values in [0, len(classes)). Raises DataError when they do not fit together.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4 or not self.images.numel():
            raise DataError(
                f"images of {self.name!r} must be a non-empty uint8 tensor [samples, channels, "
                f"height, width], not {self.images.dtype} {list(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels of {self.name!r} must be int64 [{self.images.shape[0]}], one for each "
                f"image, not {self.labels.dtype} {list(self.labels.shape)}"
            )
        lowest, highest = int(self.labels.min()), int(self.labels.max())
        if lowest < 0 or highest >= len(self.classes):
            raise DataError(
                f"labels of {self.name!r} lie in [{lowest}, {highest}], but it has "
                f"{len(self.classes)} classes: labels must lie in [0, {len(self.classes) - 1}]"
            )

    def __len__(self) -> int:
        return self.images.shape[0]


def channel_statistics(image_set: ImageSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixel values scaled to [0, 1].

    Counted from exact histograms, so the result does not depend on the number of threads and is
    the same on every rank. A channel without any variation gets the deviation 1.0, so that it can
    be divided by.
    """
    means, deviations = [], []
    levels = np.arange(256, dtype=np.float64) / 255.0
    for channel in range(image_set.images.shape[1]):
        pixels = image_set.images[:, channel].numpy().reshape(-1)
        counts = np.zeros(256, dtype=np.int64)
        # In pieces, because bincount makes a copy with eight bytes a pixel.
        for begin in range(0, pixels.size, _PIECE_PIXELS):
            counts += np.bincount(pixels[begin : begin + _PIECE_PIXELS], minlength=256)
        share = counts / pixels.size
        mean = float((share * levels).sum())
        deviation = float(np.sqrt((share * (levels - mean) ** 2).sum()))
        means.append(mean)
        deviations.append(deviation or 1.0)
    return tuple(means), tuple(deviations)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(images / 255 - mean) / std per channel: uint8 [B, C, H, W] -> new float32 [B, C, H, W].

    Computed by NumPy on the calling thread alone: torch would start a second pool of worker
    threads for the prefetch thread, which would compete with the training step for the cores.
    """
    scale = np.asarray([1.0 / (255.0 * s) for s in std], dtype=np.float32).reshape(-1, 1, 1)
    shift = np.asarray([-m / s for m, s in zip(mean, std, strict=True)], dtype=np.float32)
    # Allocated by torch because its blocks start at multiples of 64 bytes: the CPU libraries under
    # torch promise bit-equal results from run to run only for inputs aligned like that.
    result = torch.empty(images.shape, dtype=torch.float32, device="cpu")
    out = result.numpy()
    np.multiply(images.numpy(), scale, out=out, dtype=np.float32)
    np.add(out, shift.reshape(-1, 1, 1), out=out)
    return result
