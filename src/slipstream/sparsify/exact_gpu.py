"""The k largest of n, exactly, on the GPU, without the host waiting for anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.sparsify.selection import Selection, check


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How the kernels divide their work. The result is the same for all of them.

    tile: elements that a program looks at together. most_programs: how many there are at most;
    fewer keep less memory for counts (8 KiB each), more keep more of the GPU busy. rows, columns:
    counts that are summed together; columns divide 1024. All are powers of two. spare: room for
    so many candidates besides 4 k; with more of it the data is less often read four times.
    """

    tile: int = 4096
    most_programs: int = 1024
    rows: int = 256
    columns: int = 32
    spare: int = 65_536

    def __post_init__(self) -> None:
        for size in (self.tile, self.most_programs, self.rows, self.columns):
            if size < 1 or size & (size - 1):
                raise ValueError(f"{size} is no power of two.")
        if self.columns > 1024 or self.spare < 0:
            raise ValueError("There are 1024 columns at most, and no spare room below zero.")

    def num_programs(self, n: int) -> int:
        """Programs that share n elements, such that each has at least one tile; n >= 1."""
        tiles = -(-n // self.tile)
        return -(-tiles // -(-tiles // self.most_programs))


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Device memory of one call; see `triton_kernels` for the shapes."""

    counts: torch.Tensor
    totals: torch.Tensor
    above: torch.Tensor
    larger: torch.Tensor
    equal: torch.Tensor
    odd: torch.Tensor
    state: torch.Tensor
    candidates: torch.Tensor
    places: torch.Tensor


class ExactOnGPU:
    """The k largest magnitudes; of equal ones those with the lowest index, as `Exact` has them.

    Nothing is random, and nothing depends on which program runs first. Everything is put on the
    current stream of the tensors' device and can be captured in a CUDA graph: the launches depend
    on n and k only. Memory is torch's own, taken anew for each call (8 KiB for each program, and
    8 bytes for each candidate for which there is room), so that streams do not disturb one another.

    num_nonfinite: how many sums of the last `select_sum` were not finite: int32 [1] on its device,
    which the caller reads when it suits; None before the first.
    tiling: see there. Raises ImportError without Triton.
    """

    name = "exact"

    def __init__(self, tiling: Tiling | None = None) -> None:
        from slipstream.sparsify import triton_kernels  # here, as a CPU needs no Triton

        self._kernels = triton_kernels
        self._tiling = tiling if tiling is not None else Tiling()
        self.num_nonfinite: torch.Tensor | None = None

    def select(self, values: torch.Tensor, k: int, draw: int = 0) -> Selection:
        """k of `values` (float32 [n], contiguous, on the GPU; left as they are); 1 <= k <= n.

        Of no elements none can be selected: n = k = 0. draw: no use is made of it. Raises
        ValueError for tensors and k of another kind.
        """
        check_on_gpu(values, k)
        values = values.detach()
        n = values.numel()
        if k == n:
            everything = torch.arange(n, dtype=torch.int32, device=values.device)
            return Selection(everything, values.clone())
        with torch.cuda.device_of(values):
            scratch = self._count(values, None, values, k)
            return self._select(values.view(torch.int32), k, scratch, take_out=False)

    def select_sum(
        self,
        gradient: torch.Tensor,
        residual_in: torch.Tensor,
        residual_out: torch.Tensor,
        k: int,
        draw: int = 0,
    ) -> Selection:
        """Adds gradient and residual_in, selects k of the sums and writes the rest to residual_out.

        All are float32 [n], contiguous and on one GPU, and 1 <= k <= n, or n = k = 0. residual_out
        is mutated and shares no memory with the others, which are left as they are: whoever wants
        to undo the call goes on with residual_in. As in `ErrorFeedback`, bit for bit:

            sent + residual_out == gradient + residual_in

        but for an element whose sum is not finite: its residual stays as it was, and it is selected
        first; `num_nonfinite` counts them. draw: no use is made of it. Raises ValueError for
        tensors and k of another kind; residual_out is then as it was.
        """
        check_on_gpu(gradient, k)
        for residual in (residual_in, residual_out):
            check_on_gpu(residual, k)
            if residual.numel() != gradient.numel() or residual.device != gradient.device:
                raise ValueError(
                    f"The gradient has {gradient.numel():,} elements on {gradient.device} and a "
                    f"residual {residual.numel():,} on {residual.device}."
                )
        gradient, new = gradient.detach(), residual_out.detach()
        if _overlap(residual_in, new) or _overlap(gradient, new):
            raise ValueError("The new residual needs memory of its own: the old one is read later.")
        n = gradient.numel()
        self.num_nonfinite = torch.zeros(1, dtype=torch.int32, device=new.device)
        if n == 0:
            return Selection(torch.empty(0, dtype=torch.int32, device=new.device), gradient.clone())
        with torch.cuda.device_of(new):
            scratch = self._count(gradient, residual_in.detach(), new, k)
            selection = self._select(new.view(torch.int32), k, scratch, take_out=True)
            self._kernels.restore[(self._tiling.num_programs(n),)](
                residual_in.detach().view(torch.int32),
                new.view(torch.int32),
                scratch.odd,
                self.num_nonfinite,
                n,
                PROGRAMS=self._tiling.most_programs,
                TILE=self._tiling.tile,
                num_warps=NUM_WARPS,
            )
        return selection

    def _count(
        self, gradient: torch.Tensor, old: torch.Tensor | None, new: torch.Tensor, k: int
    ) -> _Scratch:
        """The first read of the data; `old` None: `gradient` itself is counted, and not written."""
        n = gradient.numel()
        scratch = self._make_scratch(n, k, gradient.device)
        self._kernels.count_first[(self._tiling.num_programs(n),)](
            gradient,
            gradient if old is None else old,
            new,
            scratch.counts,
            scratch.above,
            scratch.odd,
            scratch.state,
            n,
            k,
            ADD=old is not None,
            TILE=self._tiling.tile,
            num_warps=NUM_WARPS,
        )
        return scratch

    def _select(
        self, data: torch.Tensor, k: int, scratch: _Scratch, *, take_out: bool
    ) -> Selection:
        """All after the first read. data: the bits, int32 [n]; mutated if they are taken out."""
        kernels, s = self._kernels, scratch
        n, grid = data.numel(), (self._tiling.num_programs(data.numel()),)
        sizes = {"TILE": self._tiling.tile, "num_warps": NUM_WARPS}
        shared = {"PROGRAMS": self._tiling.most_programs, **sizes}
        first, following = kernels.FIRST_BINS.value, kernels.NEXT_BINS.value
        self._choose(n, s, first)
        kernels.tally[grid](s.counts, s.above, s.larger, s.equal, s.state, BINS=first, **sizes)
        kernels.collect_candidates[grid](
            *(data, s.candidates, s.places, s.larger, s.equal, s.state),
            *(n, s.places.numel()),
            **shared,
        )
        for shift in kernels.ROUNDS:
            kernels.count_next[grid](
                *(data, s.candidates, s.counts, s.above, s.state),
                SHIFT=shift,
                BINS=following,
                **sizes,
            )
            self._choose(n, s, following)
        kernels.tally[grid](s.counts, s.above, s.larger, s.equal, s.state, BINS=following, **sizes)
        indices = torch.empty(k, dtype=torch.int32, device=data.device)
        values = torch.empty(k, dtype=torch.int32, device=data.device)
        kernels.collect_selected[grid](
            *(data, s.candidates, s.places, s.larger, s.equal, s.state, indices, values),
            TAKE_OUT=take_out,
            **shared,
        )
        return Selection(indices, values.view(torch.float32))

    def _choose(self, n: int, scratch: _Scratch, bins: int) -> None:
        """Sums what was counted and appends a digit to the prefix."""
        tiling = self._tiling
        self._kernels.sum_counts[(bins // tiling.columns,)](
            *(scratch.counts, scratch.totals, scratch.state, tiling.num_programs(n)),
            BINS=bins,
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            TILE=tiling.tile,
            num_warps=NUM_WARPS,
        )
        self._kernels.choose_digit[(1,)](
            scratch.totals, scratch.state, BINS=bins, num_warps=NUM_WARPS
        )

    def _make_scratch(self, n: int, k: int, device: torch.device) -> _Scratch:
        """One allocation, in parts that begin on multiples of 16 bytes."""
        programs, bins = self._tiling.num_programs(n), self._kernels.FIRST_BINS.value
        room = min(n, 4 * k + self._tiling.spare)
        states = self._kernels.NUM_STATES
        sizes = (programs * bins, bins, *([programs] * 4), states, room, room)
        padded = [-(-size // 4) * 4 for size in sizes]
        whole = torch.empty(sum(padded), dtype=torch.int32, device=device)
        parts = whole.split(padded)
        return _Scratch(*(part[:size] for part, size in zip(parts, sizes, strict=True)))


NUM_WARPS = 8


def check_on_gpu(values: torch.Tensor, k: int) -> None:
    """Raises ValueError for what `ExactOnGPU` does not take; see `selection.check`.

    In Triton's interpreter, which has no device, tensors are on the CPU.
    """
    import triton  # type: ignore[import-untyped]

    wanted = "cpu" if triton.knobs.runtime.interpret else "cuda"
    check(values, k, on="GPU", device_type=wanted)


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two flat tensors share memory."""
    first_begin, second_begin = first.data_ptr(), second.data_ptr()
    first_end = first_begin + first.numel() * first.element_size()
    second_end = second_begin + second.numel() * second.element_size()
    return max(first_begin, second_begin) < min(first_end, second_end)
