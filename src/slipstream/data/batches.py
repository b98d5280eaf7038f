"""The batches of one epoch for one rank, prepared ahead by a background thread."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.data.augment import Augment
from slipstream.data.images import ImageSet, normalise
from slipstream.data.prefetch import Prefetcher
from slipstream.data.sampler import EpochSampler, evaluation_indices
from slipstream.errors import DataError


@dataclass(frozen=True)
class Batch:
    """What one rank trains on in one micro-step.

    `images` is float32 [B, C, H, W], `labels` int64 [B]; both belong to the receiver alone.
    `prepared_from` and `prepared_until` are time.perf_counter() values, in seconds.
    """

    images: Tensor
    labels: Tensor
    epoch: int
    step: int
    micro_step: int
    prepared_from: float
    prepared_until: float


class Batches(Prefetcher[Batch]):
    """Iterator over the micro-batches of `epoch`, from `start_step` on, in order of training.

    Preparation starts at construction and stays two batches ahead, so step t + 1's batch is ready
    before step t ends; construct the next epoch's Batches before evaluation to have its first
    batch ready too. The batches are a function of the arguments alone: `start_step` gives exactly
    the batches which an iteration from step 0 would have given from there on.

    `augment` (None: off) and `seed` shape the images; `mean` and `std` hold one value a channel
    for pixel values in [0, 1]. Raises DataError when sampler, statistics or augmentation do not
    fit the image set, ValueError for an epoch or step that does not exist.
    """

    def __init__(
        self,
        image_set: ImageSet,
        sampler: EpochSampler,
        epoch: int,
        *,
        start_step: int = 0,
        augment: Augment | None,
        seed: int,
        mean: Sequence[float],
        std: Sequence[float],
        depth: int = 2,
    ) -> None:
        if sampler.num_samples != len(image_set):
            raise DataError(
                f"the sampler deals {sampler.num_samples} samples, but {image_set.name!r} has "
                f"{len(image_set)}: build it with num_samples=len(image_set)"
            )
        _check_statistics(image_set, mean, std)
        if augment is not None:
            augment.check_size(*image_set.images.shape[2:])
        if epoch < 0 or not 0 <= start_step <= sampler.steps_per_epoch:
            raise ValueError(
                f"epoch {epoch}, start step {start_step}: an epoch has the steps 0 to "
                f"{sampler.steps_per_epoch - 1}"
            )
        source = _training_batches(
            image_set, sampler, epoch, start_step, augment, seed, tuple(mean), tuple(std)
        )
        super().__init__(source, depth=depth, name="slipstream-input")


def evaluation_batches(
    image_set: ImageSet,
    *,
    world_size: int,
    rank: int,
    batch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Iterator[tuple[Tensor, Tensor]]:
    """(images float32 [B, C, H, W], labels int64 [B]) of this rank's share, without augmentation.

    Over all ranks each sample comes exactly once; the last batch may be smaller, and a rank may
    get none at all, so sum over samples and reduce once after the loop.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
    _check_statistics(image_set, mean, std)
    indices = evaluation_indices(len(image_set), world_size, rank)
    for begin in range(0, len(indices), batch_size):
        share = slice(int(indices[begin]), int(indices[begin : begin + batch_size][-1]) + 1)
        yield normalise(image_set.images[share], mean, std), image_set.labels[share].clone()


def _training_batches(
    image_set: ImageSet,
    sampler: EpochSampler,
    epoch: int,
    start_step: int,
    augment: Augment | None,
    seed: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Iterator[Batch]:
    pixels = image_set.images.numpy()
    for step in range(start_step, sampler.steps_per_epoch):
        for micro_step in range(sampler.accumulation_steps):
            begin = time.perf_counter()
            samples = sampler.indices(epoch, step, micro_step)
            # Gathered by NumPy, on this thread alone: `normalise` says why.
            images = torch.from_numpy(pixels[samples.numpy()])
            if augment is not None:
                images = augment.apply(images, samples, seed=seed, epoch=epoch)
            images, labels = normalise(images, mean, std), image_set.labels[samples]
            yield Batch(images, labels, epoch, step, micro_step, begin, time.perf_counter())


def _check_statistics(image_set: ImageSet, mean: Sequence[float], std: Sequence[float]) -> None:
    channels = image_set.images.shape[1]
    fit = len(mean) == len(std) == channels and all(map(math.isfinite, (*mean, *std)))
    if not fit or min(std) <= 0:
        raise DataError(
            f"mean and std must hold one finite value for each of the {channels} channels of "
            f"{image_set.name!r}, std above 0, not {list(mean)} and {list(std)}"
        )
