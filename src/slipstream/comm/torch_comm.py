"""What Slipstream needs of torch.distributed beside collectives: groups, stores, small messages.

Names that differ between torch releases are hidden here and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slipstream.errors import RankFailure, SlipstreamError

_MAX_MESSAGE_BYTES = 2**30
# the second names are those of torch before 2.14, which warns about them
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_group(timeout_seconds: float) -> dist.ProcessGroup:
    """A new group over all ranks of the default one, used by nobody else.

    Called by all ranks together. `timeout_seconds` bounds every wait in it. Raises SlipstreamError
    when torch.distributed has not been initialised, and RankFailure when a rank does not come.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise SlipstreamError(
            "torch.distributed is not initialised; call init_process_group first "
            "or pass a process group."
        )
    try:
        group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise RankFailure(
            f"Rank {dist.get_rank()} could not make the gradients' process group with the other "
            f"{dist.get_world_size() - 1} ranks within {timeout_seconds:g} s: one of them died, "
            "froze, or is still starting. Look at the other ranks' logs, or allow more time "
            "(timeout_seconds)."
        ) from error
    assert isinstance(group, dist.ProcessGroup)
    return group


def destroy_group(group: dist.ProcessGroup) -> None:
    """Ends a group that `own_group` made; does nothing once torch.distributed is shut down."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend's name, also of a group that torch.distributed has not registered."""
    name: str = group._get_backend(device).name()
    return name


def all_gather_flat(matrix: torch.Tensor, row: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Writes every rank's `row` into `matrix`, in rank order; both 1-D and contiguous."""
    _ALL_GATHER(matrix, row, group=group)


def reduce_scatter_flat(row: torch.Tensor, matrix: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Writes the sum over ranks of this rank's part of `matrix` into `row`; both 1-D."""
    _REDUCE_SCATTER(row, matrix, group=group)


def gather_objects(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's `value` (anything JSON can hold), in rank order, on every rank.

    Two all-gathers: the lengths, then the texts padded to the longest. JSON, not pickle: what
    another rank sends is data and never code. Raises SlipstreamError for a message above 1 GiB.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([text.numel()], device=device), group=group)
    longest = max(int(length) for length in lengths)
    if longest > _MAX_MESSAGE_BYTES:
        raise SlipstreamError(f"A rank sent a message of {longest} bytes; the limit is 1 GiB.")
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [
        json.loads(text[: int(length)].cpu().numpy().tobytes())
        for text, length in zip(texts, lengths, strict=True)
    ]


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrites the tensors, in place, with rank 0's, one message per dtype and device.

    Dense tensors of any dtype and strides, the same in number, shape and order on every rank;
    otherwise Gloo ends the process. Booleans and whatever else the backend cannot send travel as
    bytes.
    """
    lanes: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        lanes.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    with torch.no_grad():
        for lane in lanes.values():
            flat = torch.cat([tensor.reshape(-1).resolve_conj() for tensor in lane])
            if flat.numel() == 0:
                continue
            dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
            if group.rank() == 0:
                continue
            parts = flat.split([tensor.numel() for tensor in lane])
            for tensor, part in zip(lane, parts, strict=True):
                _unexpanded(tensor).copy_(_unexpanded(part.view(tensor.shape), tensor))


def _unexpanded(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor without the repetitions that `expand` made in `like` (by default itself)."""
    strides = (tensor if like is None else like).stride()
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
