"""All ranks hold the same bits; and some collectives give an element the same bits anywhere."""

from __future__ import annotations

import pytest
import torch

from ranks import Rank, run_ranks
from ways import WAYS, Shape, Way, Ways

ERRORS = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}
LENGTHS = [3, 1000, 20_001]
LARGE = 400_001
"""Elements of what also goes along rings, where small tensors go at once."""
PARTS = ((0, 1), (1, 40), (40, 1000))


def normal(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=generator).to(dtype)


def means(
    shape: Shape, ways: list[Way], lengths: list[int], dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """Of every rank: by every way, for every length."""

    def body(rank: Rank) -> list[torch.Tensor]:
        mine, found = Ways(rank), []
        for way in ways:
            for length in lengths:
                flat = normal(rank.rank, length, dtype)
                mine.get(way, shape).sum_(flat, rank.world_size)
                found.append(flat)
        return found

    return run_ranks(body, sum(shape), timeout_seconds=30.0)


def check(shape: Shape, lengths: list[int], dtype: torch.dtype = torch.float32) -> None:
    ways = [way for way in WAYS if way.works_on(shape)]
    outcomes = means(shape, ways, lengths, dtype)
    cases = [(way, length) for way in ways for length in lengths]
    for case, (way, length) in enumerate(cases):
        each = [normal(rank, length, dtype).double() for rank in range(sum(shape))]
        exact = torch.stack(each).mean(0)
        error = max(ERRORS[way.wire], 0.0 if dtype is torch.float32 else 2**-7)
        for found in outcomes:
            assert torch.equal(found[case], outcomes[0][case]), (str(way), length)
            torch.testing.assert_close(
                found[case].double(), exact, rtol=0.0, atol=error, msg=f"{way} {length}"
            )


@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 2), (3, 3), (5,), (3, 2), (1, 2, 1), (2, 2, 2, 2), (1,) * 7], ids=str
)
def test_means_of_any_values_have_the_same_bits_on_all_ranks(shape: Shape) -> None:
    check(shape, LENGTHS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_means_of_16_bit_tensors_have_the_same_bits_on_all_ranks(dtype: torch.dtype) -> None:
    check((2, 2), LENGTHS, dtype)


@pytest.mark.parametrize("shape", [(2, 2), (1, 1, 1)], ids=str)
def test_means_of_large_tensors_have_the_same_bits_on_all_ranks(shape: Shape) -> None:
    check(shape, [LARGE])


def whole_and_in_parts(way: Way, shape: Shape, parts: tuple[tuple[int, int], ...]) -> bool:
    """Whether a sum in parts has the bits of the whole."""

    def body(rank: Rank) -> bool:
        collective = Ways(rank).get(way, shape)
        whole, cut = normal(rank.rank, parts[-1][1]), normal(rank.rank, parts[-1][1])
        collective.sum_(whole)
        for start, end in parts:
            collective.sum_(cut[start:end])
        return torch.equal(whole, cut)

    [same] = set(run_ranks(body, sum(shape), timeout_seconds=30.0))
    return same


@pytest.mark.parametrize("shape", [(5,), (2, 2)], ids=str)
def test_who_claims_it_gives_an_element_its_bits_whatever_travels_beside_it(shape: Shape) -> None:
    def claim(rank: Rank) -> list[Way]:
        ways = Ways(rank)
        return [w for w in WAYS if w.works_on(shape) and ways.get(w, shape).layout_invariant]

    claimed = run_ranks(claim, sum(shape))[0]
    assert {way.name for way in claimed} == {"direct"}
    for way in claimed:
        assert whole_and_in_parts(way, shape, PARTS), str(way)


@pytest.mark.parametrize("name", ["native", "ring"])
def test_who_does_not_claim_it_sums_in_an_order_that_depends_on_the_place(name: str) -> None:
    assert not whole_and_in_parts(Way(name, "float32"), (5,), PARTS)


def test_a_hierarchical_sum_depends_on_the_place_where_it_goes_along_a_ring() -> None:
    parts = ((0, 1), (1, 40), (40, 20_001))
    assert not whole_and_in_parts(Way("hierarchical", "float32"), (1,) * 5, parts)
