"""Both halves of an all-reduce against sums that are exact, and against each other."""

from __future__ import annotations

import pytest
import torch

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.comm import Alone, Halves, NativeHalves

ROWS = [*range(9), 31, 32, 33, 1023, 1025, 200_001]  # the last one goes along a ring
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def matrix_of(rank: int, world_size: int, row: int, dtype: torch.dtype) -> torch.Tensor:
    """[world_size * row] small integers: every sum of theirs is exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * row + rank)
    return torch.randint(-16, 17, (world_size * row,), generator=generator).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_halves_give_exact_sums_to_their_owners_and_then_to_all(world_size: int) -> None:
    def body(rank: Rank) -> list[tuple[torch.Tensor, torch.Tensor]]:
        halves: Halves = Alone() if world_size == 1 else NativeHalves(rank.group)
        found = []
        for dtype in DTYPES:
            for row in ROWS:
                matrix = matrix_of(rank.rank, world_size, row, dtype)
                before, mine = matrix.clone(), torch.full((row,), 7.0, dtype=dtype)
                halves.reduce_scatter(matrix, mine)
                assert torch.equal(matrix, before), "what is scattered stays as it is"
                everyone = torch.full((world_size * row,), 7.0, dtype=dtype)
                halves.all_gather(mine, everyone)
                found.append((mine, everyone))
        return found

    outcomes = run_ranks(body, world_size)
    cases = [(dtype, row) for dtype in DTYPES for row in ROWS]
    for case, (dtype, row) in enumerate(cases):
        each = [matrix_of(rank, world_size, row, torch.float64) for rank in range(world_size)]
        total = torch.stack(each).sum(0).to(dtype)
        for rank, found in enumerate(outcomes):
            mine, everyone = found[case]
            assert torch.equal(mine, total[rank * row : (rank + 1) * row]), (dtype, row)
            assert torch.equal(everyone, total), (dtype, row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_summed_in_32_and_divided_before_they_are_rounded(
    dtype: torch.dtype,
) -> None:
    each = torch.tensor([[40000.0, 1.0], [40000.0, 2**-9], [-20000.0, 2**-9]], dtype=dtype)

    def body(rank: Rank) -> torch.Tensor:
        mine = torch.empty(2, dtype=dtype)
        NativeHalves(rank.group).reduce_scatter(each[rank.rank].repeat(3), mine, divisor=3)
        return mine

    mean = (each.float().sum(0) / 3).to(dtype)
    for mine in run_ranks(body, 3):
        assert torch.equal(mine, mean) and bool(mine.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_elements_bits_do_not_depend_on_what_travels_beside_it(dtype: torch.dtype) -> None:
    each = torch.randn(3, 250_000, generator=torch.Generator().manual_seed(0)).to(dtype)

    def body(rank: Rank) -> torch.Tensor:
        halves, found = NativeHalves(rank.group), []
        for row in (250_000, 1, 70_000):
            mine = torch.empty(row, dtype=dtype)
            halves.reduce_scatter(each[rank.rank, :row].repeat(3), mine, divisor=3)
            found.append(mine)
        whole, one, part = found
        assert torch.equal(one, whole[:1]) and torch.equal(part, whole[:70_000])
        return whole

    for rank, mine in enumerate(run_ranks(body, 3)):
        second, third, first = (each[(rank + step) % 3].float() for step in (1, 2, 3))
        assert torch.equal(mine, (((second + third) + first) / 3).to(dtype)), "around the ring"


@pytest.mark.parametrize("half", ["reduce_scatter", "all_gather"])
def test_a_rank_that_is_gone_is_an_error_on_a_ring_too(half: str) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 1:
            rank.hold(8.0)
            raise SystemExit
        matrix, row = torch.zeros(600_000), torch.zeros(200_000)
        halves = NativeHalves(rank.group)
        if half == "reduce_scatter":
            halves.reduce_scatter(matrix, row)
        else:
            halves.all_gather(row, matrix)

    outcomes = run_ranks_settled(body, 3, timeout_seconds=1.0)
    assert isinstance(outcomes[0], RuntimeError) or isinstance(outcomes[2], RuntimeError)
