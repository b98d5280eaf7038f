"""`native`: the backend's own all-reduce (Gloo's ring on CPUs, NCCL's choice on GPUs)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from slipstream.comm.torch_comm import backend_of
from slipstream.comm.widening import SIXTEEN_BIT, as_wide
from slipstream.wires import DenseWire


class Native:
    """The all-reduce of a process group's backend. Follows `Collective`."""

    name = "native"
    wire: DenseWire = "float32"
    layout_invariant = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_gloo: bool | None = None

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """See `Collective.sum_`. Sixteen-bit tensors travel and are summed as float32."""
        with as_wide(flat) as wide:
            dist.all_reduce(wide, group=self._group)
            if divisor != 1:
                wide.div_(divisor)

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> Any:
        """See `Collective.begin`: Gloo sums wide tensors in threads of its own."""
        if divisor != 1 or flat.dtype in SIXTEEN_BIT or flat.device.type != "cpu":
            return None
        if self._is_gloo is None:
            self._is_gloo = backend_of(self._group, flat.device) == "gloo"
        return self._group.allreduce([flat]) if self._is_gloo else None
