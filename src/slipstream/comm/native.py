"""`native`: the backend's own all-reduce (Gloo's ring on CPUs, NCCL's choice on GPUs)."""

from __future__ import annotations

import torch
import torch.distributed as dist

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


class Native:
    """The all-reduce of a process group's backend. Follows `Collective`."""

    name = "native"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def average_(self, flat: torch.Tensor) -> None:
        """See `Collective.average_`. Sixteen-bit tensors travel and are summed as float32."""
        if flat.dtype in _SIXTEEN_BIT:
            wide = flat.float()
            dist.all_reduce(wide, op=dist.ReduceOp.AVG, group=self._group)
            flat.copy_(wide)
        else:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self._group)
