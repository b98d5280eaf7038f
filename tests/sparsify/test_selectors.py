"""Every selector against the readable reference, on numbers of every kind."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.errors import PlanError
from slipstream.sparsify import SELECTORS, Selection, k_of, selector
from slipstream.sparsify.exact import Exact
from slipstream.sparsify.mstopk import MSTopK
from slipstream.sparsify.sampled import Sampled
from slipstream.wires import SelectorName

INF, NAN = float("inf"), float("nan")
ODD = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1.0, -1.0, 3.4e38, INF, -INF, NAN]

any_bits = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=300).map(
    lambda bits: torch.tensor(bits, dtype=torch.int32).view(torch.float32)
)
few_values = st.lists(st.sampled_from(ODD), min_size=1, max_size=300).map(torch.tensor)
tensors = any_bits | few_values


def bits_of(values: torch.Tensor) -> list[int]:
    found: list[int] = values.view(torch.int32).tolist()
    return found


def assert_well_formed(selection: Selection, values: torch.Tensor, k: int) -> None:
    """Exactly k indices, ascending, and the bits that stand there."""
    assert selection.indices.dtype == torch.int32 and selection.values.dtype == torch.float32
    assert selection.indices.numel() == k
    assert bool((selection.indices.diff() > 0).all())
    assert bits_of(selection.values) == bits_of(values[selection.indices])


def by_sorting(values: torch.Tensor, k: int) -> list[int]:
    """The k largest magnitudes as plain Python finds them: NaN first, ties by index."""
    numbers = values.abs().tolist()

    def rank(i: int) -> tuple[bool, float, int]:
        is_nan = numbers[i] != numbers[i]
        return not is_nan, 0.0 if is_nan else -numbers[i], i

    return sorted(sorted(range(len(numbers)), key=rank)[:k])


@given(values=tensors, data=st.data())
def test_reference_and_exact_select_the_largest_and_of_ties_the_first(
    values: torch.Tensor, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, values.numel()))
    before = bits_of(values)
    for name in ("reference", "exact"):
        selection = selector(name).select(values, k)
        assert_well_formed(selection, values, k)
        assert selection.indices.tolist() == by_sorting(values, k), name
    assert bits_of(values) == before


@given(values=tensors, data=st.data())
def test_approximate_selectors_select_k_and_what_is_not_finite_first(
    values: torch.Tensor, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, values.numel()))
    seed, draw = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    for name in ("mstopk", "sampled"):
        selection = selector(name, seed).select(values, k, draw)
        assert_well_formed(selection, values, k)
        num_odd = int((~values.isfinite()).sum())
        assert int((~selection.values.isfinite()).sum()) == min(k, num_odd), name
        again = selector(name, seed).select(values, k, draw)
        assert torch.equal(selection.indices, again.indices), "the same seed and draw"


def large(kind: str, n: int = 200_000) -> torch.Tensor:
    """[n] numbers on which selection by a sample goes its different ways."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal(n).astype(np.float32)
    made = {
        "normal": normal,
        "cubed": normal**3,
        "equal": np.full(n, -2.5, np.float32),
        "zero": np.zeros(n, np.float32),
        "denormal": normal * np.float32(1e-42),
        "few": np.where(rng.random(n) < 1e-4, normal, np.float32(0)),
        "ties": np.round(normal),
        "rising": np.sort(normal),
        "falling": -np.sort(-np.abs(normal)),
        "bfloat16": torch.from_numpy(normal).bfloat16().float().numpy(),
        "layers": normal * np.repeat(np.array([1e-6, 1.0, 1e-3, 1e3], np.float32), n // 4),
        "columns": normal * np.tile(np.array([100, 1, 1, 1, 1, 1, 1, 1], np.float32), n // 8),
        "not finite": np.where(
            rng.random(n) < 0.3, np.float32(NAN), np.copysign(np.float32(INF), normal)
        ),
    }
    return torch.from_numpy(np.ascontiguousarray(made[kind], dtype=np.float32))


KINDS = [
    *("normal", "cubed", "equal", "zero", "denormal", "few", "ties", "rising", "falling"),
    *("bfloat16", "layers", "columns", "not finite"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_large_tensors_of_every_kind(kind: str) -> None:
    values = large(kind)
    for k in (1, 2, 200, 2000, 60_000, values.numel() - 1, values.numel()):
        expected = selector("reference").select(values, k)
        for name in SELECTORS:
            selection = selector(name).select(values, k)
            assert_well_formed(selection, values, k)
            if name == "exact":
                assert torch.equal(selection.indices, expected.indices), (name, k)


def test_a_sample_that_misleads_costs_reads_and_no_elements() -> None:
    from slipstream.sparsify.kernels import num_samples, sampled_at

    n, k, exact = 100_000, 500, Exact()
    num = num_samples(n)
    values = torch.randn(n, generator=torch.Generator().manual_seed(1))
    exact.select(values, k)
    assert exact.reads == 1
    values[[sampled_at(i, n, num) for i in range(num)]] = 10.0
    values[:300] = 20.0
    assert num > k
    selection = exact.select(values, k)
    assert torch.equal(selection.indices, selector("reference").select(values, k).indices)
    lonely = torch.zeros(n)
    lonely[[sampled_at(i, n, num) for i in range(0, num, 20)]] = 1.0
    assert int((lonely > 0).sum()) < k
    selection = exact.select(lonely, k)
    assert exact.reads == 3
    assert torch.equal(selection.indices, selector("reference").select(lonely, k).indices)


def test_one_selector_serves_tensors_of_all_sizes() -> None:
    exact, generator = Exact(), torch.Generator().manual_seed(2)
    for n in (100_000, 10, 1, 70_000, 16_384, 300_000):
        values = torch.randn(n, generator=generator)
        k = k_of(0.03, n)
        expected = selector("reference").select(values, k).indices
        assert torch.equal(exact.select(values, k).indices, expected)


@pytest.mark.parametrize("n", [1, 3, 1000])
@pytest.mark.parametrize("density", [1e-6, 0.5, 1, 1.0])
def test_k_is_the_density_rounded_up_and_at_least_one(density: float, n: int) -> None:
    assert k_of(density, n) == {1e-6: 1, 0.5: (n + 1) // 2, 1: n}[density]


@given(n=st.integers(0, 10**6), hundredths=st.integers(1, 100))
@example(n=100, hundredths=7)  # 0.07 * 100 is 7.000000000000001
@example(n=100, hundredths=29)
def test_k_counts_densities_as_decimal_numbers(n: int, hundredths: int) -> None:
    assert k_of(hundredths / 100, n) == min(n, max(1, -(-hundredths * n // 100)))


@pytest.mark.parametrize("density", [0, 0.0, -1, 1.5, INF, NAN, True])
def test_other_densities_are_refused(density: float) -> None:
    with pytest.raises(PlanError, match="above 0 and at most 1"):
        k_of(density, 1000)


@pytest.mark.parametrize("name", SELECTORS)
def test_of_nothing_nothing_is_selected(name: str) -> None:
    selection = selector(name).select(torch.empty(0), k_of(0.5, 0))
    assert selection.indices.numel() == selection.values.numel() == 0


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize(
    ("values", "k", "message"),
    [
        (torch.ones(3), 0, "0 of 3"),
        (torch.ones(3), 4, "4 of 3"),
        (torch.ones(0), 1, "1 of 0"),
        (torch.ones(3, dtype=torch.float64), 1, "float64"),
        (torch.ones(3, device="meta"), 1, "meta"),
        (torch.ones(2, 2), 1, r"\(2, 2\)"),
        (torch.ones(4)[::2], 1, "contiguous"),
    ],
)
def test_what_cannot_be_selected_from_is_refused(
    name: str, values: torch.Tensor, k: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        selector(name).select(values, k)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    assert get_args(SelectorName) == SELECTORS, "plans name them so"
    with pytest.raises(PlanError, match="no selector 'topk'; there are exact, mstopk"):
        selector("topk")


def recall(name_or_selector: MSTopK | Sampled, values: torch.Tensor, k: int) -> float:
    exact = set(Exact().select(values, k).indices.tolist())
    return len(exact & set(name_or_selector.select(values, k).indices.tolist())) / k


@pytest.mark.parametrize("kind", ["normal", "cubed"])
@pytest.mark.parametrize("k", [200, 2000])
def test_more_samplings_find_more_of_the_largest(kind: str, k: int) -> None:
    values = large(kind)
    found = [recall(MSTopK(0, samplings), values, k) for samplings in (5, 10, 30)]
    assert found[0] > 0.5 and found[1] > 0.98 and found[2] == 1.0


@pytest.mark.parametrize("kind", ["normal", "cubed"])
def test_a_sampled_threshold_finds_most_of_the_largest(kind: str) -> None:
    assert recall(Sampled(0), large(kind), 2000) > 0.7


@pytest.mark.parametrize("kind", [MSTopK, Sampled])
def test_runs_begin_elsewhere_with_another_draw_or_seed(kind: type[MSTopK] | type[Sampled]) -> None:
    values = torch.ones(20_000)  # all tie, so that everything depends on the run
    if kind is Sampled:  # up to 1.3 k reach the threshold
        values[2500:] = 0.001
    firsts = {
        int(kind(seed).select(values, 2000, draw).indices[0]) for seed in (0, 1) for draw in (0, 1)
    }
    assert len(firsts) == 4


def test_every_beginning_of_a_run_is_drawn_and_none_beyond() -> None:
    values = torch.ones(10)
    starts = {int(MSTopK(0).select(values, 8, draw).indices[0]) for draw in range(100)}
    assert starts == {0, 1, 2}


def test_mstopk_goes_below_the_mean_where_fewer_than_k_reach_it() -> None:
    values = torch.cat([torch.full((10,), 1e6), torch.rand(990)])
    assert recall(MSTopK(0, 30), values, 500) > 0.99
