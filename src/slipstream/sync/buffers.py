"""Flat buffers: one per bucket, with a view for each gradient and a flag behind them all.

    flat = [ gradient 0 | gradient 1 | ... | flag 0 | flag 1 | ... ]

The flag of a gradient is 1 where the rank contributed to it and 0 where it did not, so the averaged
flag tells whether any rank did, without another collective. With `check_finite` it is NaN where the
rank's gradient was not finite (or so large that the sum over ranks would overflow).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from slipstream.comm import Collectives
from slipstream.comm.formats import TRAVELS_AS
from slipstream.plan import Bucket
from slipstream.sparsify import Momentum
from slipstream.sync.tickets import Finished
from slipstream.wires import DenseWire

SMALL_BYTES = 2**14
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
Strides = tuple[int, ...]


class Slot:
    """One gradient's place in a bucket, and what happened to it in the current round.

    flat: the part of the bucket that holds it, 1-D; view: the same with the agreed strides, and the
    parts of complex numbers together; stride: those strides. The view itself is never given away,
    as Module.to() changes the very tensor object that `p.grad` is: `lend` hands out an alias, and
    `holds` tells by the memory whether a gradient still is one.
    alias: one made beforehand, in a loop and not in a hook, where caches are cold; address: of the
    view's memory.
    contributed: its hook fired in this round; kept: it holds gradient that was accumulated without
    synchronising and waits for the next round; copy_back: the parameter's layout is not the agreed
    one, so that its gradient is a tensor of its own and gets the average copied back.
    divided: the view holds this rank's gradient divided by the number of ranks already.
    is_small: copying it takes no longer than finding out that it must be copied.
    saved: what the view held before this round, where this rank contributes nothing to it.
    told_sparse: the user has been told that its gradient is sparse.
    """

    __slots__ = (
        "address",
        "alias",
        "buffer",
        "contributed",
        "copy_back",
        "divided",
        "flag",
        "flat",
        "had_gradient",
        "is_small",
        "kept",
        "name",
        "param",
        "saved",
        "stride",
        "told_sparse",
        "view",
    )

    def __init__(self, name: str, param: nn.Parameter, buffer: BucketBuffer) -> None:
        self.name = name
        self.param = param
        self.buffer = buffer
        self.view: torch.Tensor
        self.alias: torch.Tensor | None = None
        self.address = 0
        self.flag: torch.Tensor
        self.flat: torch.Tensor
        self.stride: Strides
        self.contributed = False
        self.kept = False
        self.copy_back = False
        self.divided = False
        self.had_gradient = False
        self.is_small = param.nbytes <= SMALL_BYTES
        self.saved: torch.Tensor | None = None
        self.told_sparse = False

    def lend(self) -> None:
        """Makes `param.grad` the view, or a copy in the parameter's own layout where that differs.

        Replaces `param.grad`.
        """
        if self.param.stride() != self.stride:
            self.param.grad = torch.empty_like(self.param).copy_(self.view)
            return
        alias, self.alias = self.alias, None
        self.param.grad = self.view.detach() if alias is None else alias

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether `gradient` is the view's memory in the view's form."""
        view = self.view
        return (
            gradient.layout is view.layout
            and gradient.data_ptr() == self.address
            and gradient.dtype is view.dtype
            and gradient.stride() == view.stride()
            and gradient.is_conj() == view.is_conj()
        )


class BucketBuffer:
    """The memory of one bucket and its state in the current round.

    collective: carries it; divides_first: gradients are divided by the number of ranks before they
    travel. momentum: see `TopK`. flat: 1-D, of the gradients' dtype (real parts and imaginary parts
    interleaved for complex ones); flags: its tail, one element a gradient. pending: gradients of
    this round that are still to be copied in.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, nn.Parameter],
        strides: Mapping[str, Strides],
        collectives: Collectives,
        momentum: Momentum | None = None,
    ) -> None:
        members = [(name, params[name]) for name in bucket.gradients]
        first = members[0][1]
        widths = [p.numel() * (2 if p.is_complex() else 1) for _, p in members]
        self.bytes = bucket.bytes
        self.collective = collectives.for_bucket(
            bucket.collective, bucket.wire, sum(widths), momentum
        )
        self.flat = torch.zeros(
            sum(widths) + len(members), dtype=real_dtype(first.dtype), device=first.device
        )
        self.flags = self.flat[sum(widths) :]
        # 16 bits, in memory or on the wire, would lose small values: then the collective divides
        rounds = isinstance(bucket.wire, str) and bucket.wire != "float32"
        self.divides_first = self.flat.dtype not in SIXTEEN_BIT and not rounds
        self.local_flags: torch.Tensor | None = None
        self.missing = 0
        self.pending: list[tuple[Slot, torch.Tensor | None]] = []
        self.ready_seconds = 0.0
        self.ticket: Finished | None = None
        self.slots: list[Slot] = []
        start = 0
        for position, ((name, param), width) in enumerate(zip(members, widths, strict=True)):
            slot = Slot(name, param, self)
            slot.flat = self.flat[start : start + width]
            slot.view = view_of(slot.flat, param, strides[name])
            slot.stride = slot.view.stride()
            slot.address = slot.view.data_ptr()
            slot.flag = self.flags[position]
            self.slots.append(slot)
            start += width

    def begin(self) -> None:
        """Starts a round: nothing contributed, nothing sent."""
        self.missing = len(self.slots)
        self.pending.clear()
        self.ticket = None
        self.flags.fill_(1.0)
        for slot in self.slots:
            slot.contributed = False
            slot.copy_back = False
            slot.divided = False
            slot.saved = None
            if slot.alias is None:
                slot.alias = slot.view.detach()


def places_of(buffer: BucketBuffer) -> list[tuple[str, int]]:
    """The names of a bucket's gradients and how many elements each has, in order."""
    return [(slot.name, slot.flat.numel()) for slot in buffer.slots]


def unused_of(buffer: BucketBuffer) -> Iterator[tuple[int, int]]:
    """The elements, from and to, of gradients that no rank used in the round that has ended."""
    start = 0
    for slot in buffer.slots:
        stop = start + slot.flat.numel()
        if not slot.contributed and slot.flag.item() == 0.0:
            yield start, stop
        start = stop


def agreed_strides(param: torch.Tensor) -> Strides:
    """The strides under which a gradient travels: the parameter's own where they are gapless.

    A complex, overlapping or gappy parameter travels in row-major order.
    """
    if param.is_complex() or not _is_gapless(param):
        return torch.empty(param.shape, device="meta").stride()
    return param.stride()


def in_layout(gradient: torch.Tensor, strides: Strides) -> torch.Tensor:
    """The gradient, copied where its strides are others."""
    if gradient.stride() == strides:
        return gradient
    copy = torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    )
    return copy.copy_(gradient)


def mark_finite(slot: Slot, world_size: int) -> None:
    """Sets the slot's flag to NaN when its view is not finite; see `nan_unless_finite`."""
    if slot.view.numel() > 0:
        wire = slot.buffer.collective.wire
        if not isinstance(wire, str):
            wire = "float32"  # what a sparse one cannot send of a value, it keeps
        slot.flag.add_(nan_unless_finite(slot.view, world_size, wire).to(slot.flag.dtype))


def nan_unless_finite(
    gradient: torch.Tensor, world_size: int, wire: DenseWire = "float32"
) -> torch.Tensor:
    """0 (0-d), or NaN where the gradient is not finite, or its sum over ranks or what travels of it
    would overflow.

    Only 16-bit gradients are summed before they are divided, in 32 bits, which bfloat16's range
    fills. No value is read back, so nothing waits on a GPU.
    """
    largest: torch.Tensor = torch.linalg.vector_norm(gradient, ord=float("inf"))
    if largest.dtype in SIXTEEN_BIT:
        largest = largest.float().mul_(world_size)
    elif wire != "float32":
        largest = largest.to(TRAVELS_AS[wire]).to(largest.dtype)
    return largest.mul_(0.0)


def view_of(flat: torch.Tensor, param: torch.Tensor, stride: Strides) -> torch.Tensor:
    """The part of a bucket, 1-D, in the shape of the parameter and with these strides."""
    if param.is_complex():
        pairs = flat.view(param.numel(), 2)
        return torch.view_as_complex(pairs).view(param.shape)
    return flat.as_strided(param.shape, stride)


def _is_gapless(param: torch.Tensor) -> bool:
    """Whether the strides visit each of numel() adjacent elements exactly once."""
    expected = 1
    dims = [(s, n) for s, n in zip(param.stride(), param.shape, strict=True) if n != 1]
    for stride, size in sorted(dims):
        if stride != expected:
            return param.numel() == 0
        expected *= size
    return True


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a complex number's parts; a real one is its own."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
