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

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """See `Collective.sum_`. Sixteen-bit tensors travel and are summed as float32."""
        wide = flat.float() if flat.dtype in _SIXTEEN_BIT else flat
        dist.all_reduce(wide, group=self._group)
        if divisor != 1:
            wide.div_(divisor)
        if wide is not flat:
            flat.copy_(wide)
