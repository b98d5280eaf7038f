"""The k largest of n, exactly, at the speed at which memory is read."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.sparsify import kernels
from slipstream.sparsify.selection import Selection, check, everything


class Exact:
    """The k largest magnitudes; of equal ones those with the lowest index; nothing is random.

    reads: how often the last call read all the data, once or three times (see `kernels`).
    """

    name = "exact"

    def __init__(self) -> None:
        self.reads = 0
        self._places = np.empty(0, np.int32)
        self._sizes = np.empty(0, np.int32)
        self._sample = np.empty(kernels.MOST_SAMPLES, np.int32)
        self._sums = np.empty(kernels.CHUNK, np.float32)

    def select(self, values: torch.Tensor, k: int, draw: int = 0) -> Selection:
        """See `Selector`."""
        check(values, k)
        n = values.numel()
        if k == n:
            return everything(values)
        self._make_room(n, k)
        array = values.detach().numpy()
        indices, picked = np.empty(k, np.int32), np.empty(k, np.float32)
        self.reads = kernels.select_largest(
            array,
            array.view(np.int32),
            k,
            self._places,
            self._sizes,
            self._sample[: kernels.num_samples(n)],
            indices,
            picked,
        )
        return Selection(torch.from_numpy(indices), torch.from_numpy(picked))

    def add_and_select(
        self, gradient: torch.Tensor, old: torch.Tensor, new: torch.Tensor, k: int
    ) -> tuple[int, torch.Tensor]:
        """See `Adding`."""
        n = gradient.numel()
        self._make_room(n, k)
        array = new.numpy()
        written, self.reads = kernels.add_and_collect(
            gradient.numpy(),
            old.numpy(),
            array,
            array.view(np.int32),
            k,
            self._places,
            self._sizes,
            self._sample[: kernels.num_samples(n)],
            self._sums,
            self._sums.view(np.int32),
        )
        return written, torch.from_numpy(self._places[:k].copy())

    def _make_room(self, n: int, k: int) -> None:
        room = kernels.room_for(n, k)
        if len(self._places) < room:
            self._places = np.empty(room, np.int32)
            self._sizes = np.empty(room, np.int32)
