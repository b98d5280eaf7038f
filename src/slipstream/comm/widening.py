"""Sixteen-bit tensors are summed in 32 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@contextmanager
def as_wide(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """`flat` itself, or a float32 copy of 16-bit values that is rounded back into it afterwards."""
    wide = flat.float() if flat.dtype in SIXTEEN_BIT else flat
    yield wide
    if wide is not flat:
        flat.copy_(wide)
