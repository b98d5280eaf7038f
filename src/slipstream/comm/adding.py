"""Sums of flat tensors, formed in the calling thread alone."""

from __future__ import annotations

import numpy as np
import torch

_CHUNK = 2**14
"""Elements that torch adds at a time: they stay in the cache, and below 2**15 it adds in the
calling thread alone, which leaves the other cores to backward."""
_NUMPY_HAS = (torch.float32, torch.float64)


def add(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> None:
    """Writes first + second (1-D, on one device) into `out`, in the dtype of `out`."""
    if first.device.type == "cpu" and first.dtype == second.dtype and first.dtype in _NUMPY_HAS:
        np.add(first.numpy(), second.numpy(), out=out.numpy())
        return
    chunks = (tensor.split(_CHUNK) for tensor in (first, second, out))
    for mine, theirs, total in zip(*chunks, strict=True):
        torch.add(mine, theirs, out=total)
