"""Which rank sees which sample when: pure functions of seed, epoch and step."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.data.streams import Purpose, permutation
from slipstream.errors import DataError

Remainder = Literal["drop", "repeat"]


class EpochSampler:
    """Deals the samples of an epoch to the ranks, after one global shuffle per epoch.

    The order of an epoch is a function of (seed, epoch) alone. Step t takes the samples
    [t * G, (t + 1) * G) of that order, G = `global_batch_size`; micro-step m takes the m-th of
    `accumulation_steps` equal parts of them, and rank r the r-th of `world_size` equal parts of
    that. So what a step (and a micro-step) sees over all ranks does not depend on the number of
    ranks, and every rank does the same number of steps with the same number of samples.

    `remainder` says what becomes of the last incomplete batch: "drop" leaves out the samples that
    do not fill it (others in each epoch, since the shuffle differs), "repeat" fills it from the
    start of the same epoch's order, so that each sample is seen at least once.

    Raises DataError, on every rank alike, when there are more ranks than samples, when a batch
    cannot be divided evenly, or with "drop" when a batch is larger than the data.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        world_size: int,
        rank: int,
        global_batch_size: int,
        accumulation_steps: int = 1,
        seed: int,
        remainder: Remainder = "drop",
    ) -> None:
        _check_ranks(num_samples, world_size, rank)
        if remainder not in ("drop", "repeat"):
            raise ValueError(f"remainder must be 'drop' or 'repeat', not {remainder!r}")
        if num_samples < world_size:
            raise DataError(
                f"there are {world_size} ranks but only {num_samples} samples, so some ranks would "
                f"have nothing to do: start at most {num_samples} ranks"
            )
        share = world_size * accumulation_steps
        if global_batch_size < 1 or accumulation_steps < 1 or global_batch_size % share:
            raise DataError(
                f"a global batch of {global_batch_size} cannot be divided evenly over {world_size} "
                f"ranks x {accumulation_steps} accumulation steps: choose a multiple of {share}"
            )
        if remainder == "drop" and global_batch_size > num_samples:
            raise DataError(
                f"a global batch of {global_batch_size} is larger than the {num_samples} samples, "
                f"so an epoch would have no step: choose a batch of at most {num_samples}"
            )
        self.num_samples = num_samples
        self.world_size = world_size
        self.rank = rank
        self.global_batch_size = global_batch_size
        self.accumulation_steps = accumulation_steps
        self.local_batch_size = global_batch_size // share
        self.seed = seed
        self.remainder = remainder
        self.steps_per_epoch = num_samples // global_batch_size
        if remainder == "repeat":
            self.steps_per_epoch = -(-num_samples // global_batch_size)
        # One tuple, replaced as a whole: the sampler may be asked from several threads.
        self._latest: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def indices(self, epoch: int, step: int, micro_step: int = 0) -> Tensor:
        """Sample indices of this rank's micro-batch: int64 [local_batch_size].

        Raises ValueError for an epoch, step or micro-step that does not exist.
        """
        if epoch < 0:
            raise ValueError(f"epoch {epoch} is negative")
        if not 0 <= step < self.steps_per_epoch:
            raise ValueError(f"step {step} is not in [0, {self.steps_per_epoch})")
        if not 0 <= micro_step < self.accumulation_steps:
            raise ValueError(f"micro-step {micro_step} is not in [0, {self.accumulation_steps})")
        part = micro_step * self.world_size + self.rank
        start = step * self.global_batch_size + part * self.local_batch_size
        positions = np.arange(start, start + self.local_batch_size) % self.num_samples
        return torch.from_numpy(self._order(epoch)[positions])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        latest_epoch, order = self._latest
        if latest_epoch != epoch:
            order = permutation(
                self.num_samples, seed=self.seed, purpose=Purpose.SHUFFLE, epoch=epoch
            )
            self._latest = (epoch, order)
        return order


def evaluation_indices(num_samples: int, world_size: int, rank: int) -> Tensor:
    """This rank's share of an evaluation: int64, consecutive and ascending.

    Over all ranks each sample appears exactly once. Shares differ by at most one sample and are
    empty where there are more ranks than samples, so a caller must not run collectives per sample
    or per batch, and must weight its sums by counts.
    """
    _check_ranks(num_samples, world_size, rank)
    return torch.arange(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)


def _check_ranks(num_samples: int, world_size: int, rank: int) -> None:
    if num_samples < 1:
        raise DataError(f"there are {num_samples} samples to deal to {world_size} ranks: need one")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in [0, {world_size})")
