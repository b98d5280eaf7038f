"""Selections on the wire: indices, then values, in messages of one size for all of a team.

    message = [ k indices, int32 | k values | padding to 8 bytes ]

Their size follows from k alone, which all ranks know, so nobody has to ask how much is coming.
"""

from __future__ import annotations

import torch

from slipstream.sparsify import Selection

_INDEX_BYTES = 4
ALIGNED_BYTES = 8
VALUES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def message_bytes(k: int, values: torch.dtype) -> int:
    """The size of a message with k elements; none for none."""
    return -(-k * (_INDEX_BYTES + values.itemsize) // ALIGNED_BYTES) * ALIGNED_BYTES


def pack(selection: Selection, message: torch.Tensor) -> None:
    """Writes the selection into `message` (uint8 [message_bytes], mutated)."""
    indices, values = _views(message, selection.indices.numel(), selection.values.dtype)
    indices.copy_(selection.indices)
    values.copy_(selection.values)


def add_message(message: torch.Tensor, k: int, values: torch.dtype, row: torch.Tensor) -> bool:
    """Adds what a message holds to the elements of `row` (float32 [n], mutated) that it names.

    Returns whether all that was sent is finite. Raises RuntimeError or IndexError for an element
    that the row does not have.
    """
    if k == 0:
        return True
    indices, sent = _views(message, k, values)
    wide = sent.float()
    row.index_add_(0, indices, wide)
    return bool(wide.isfinite().all())


def _views(message: torch.Tensor, k: int, values: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    split = k * _INDEX_BYTES
    end = split + k * values.itemsize
    return message[:split].view(torch.int32), message[split:end].view(values)
