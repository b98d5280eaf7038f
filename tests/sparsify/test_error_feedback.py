"""What is sent and what stays are what there was, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.sparsify import SELECTORS, ErrorFeedback, Selection, k_of, selector
from slipstream.sparsify.residual import rounded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")

float_bits = st.integers(-(2**31), 2**31 - 1)


def floats(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def added_up(selection: Selection, residual: torch.Tensor) -> torch.Tensor:
    """sent + residual; where nothing was sent, the residual itself, whose zero may be negative."""
    total = residual.clone()
    total[selection.indices] = selection.values.float() + residual[selection.indices]
    return total


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SELECTORS)
@settings(max_examples=25)
@given(data=st.data())
def test_nothing_is_lost_and_nothing_infinite_is_kept(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, 40))
    feedback = ErrorFeedback(n, selector(name), values=dtype)
    for draw in range(3):
        bits = data.draw(
            st.lists(float_bits | st.sampled_from([0, -(2**31)]), min_size=n, max_size=n)
        )
        gradient, k = floats(bits), data.draw(st.integers(1, n))
        old = feedback.residual.clone()
        before = gradient.clone()
        selection = feedback.select(gradient, k, draw)
        assert same_bits(gradient, before)
        assert selection.values.dtype == dtype and selection.indices.numel() == k
        sums = gradient + old
        finite = sums.isfinite()
        assert feedback.num_nonfinite == int((~finite).sum())
        assert bool(feedback.residual.isfinite().all())
        total = added_up(selection, feedback.residual)
        assert same_bits(total[finite], sums[finite])
        assert same_bits(feedback.residual[~finite], old[~finite])
        num_sent = int((~selection.values.isfinite()).sum())
        assert num_sent == min(k, feedback.num_nonfinite), "what is not finite is seen by all"


@given(bits=st.lists(float_bits, min_size=1, max_size=100))
def test_rounding_is_to_finite_numbers_whose_rest_is_exact(bits: list[int]) -> None:
    values = floats(bits)
    values = values[values.isfinite()]
    for dtype in (torch.bfloat16, torch.float16):
        sent = rounded(values, dtype)
        assert bool(sent.isfinite().all())
        exact = values.double() - sent.double()
        near = values.abs() <= torch.finfo(dtype).max
        assert torch.equal((values - sent.float())[near].double(), exact[near])
        assert torch.equal((values - sent.float()) + sent.float(), values)


def test_numbers_beyond_float16_that_lie_halfway_are_not_moved() -> None:
    values = (2**29 + 64 * torch.arange(4096, dtype=torch.int64)).float()
    sent = rounded(torch.cat([values, -values]), torch.float16).float()
    assert torch.equal((torch.cat([values, -values]) - sent) + sent, torch.cat([values, -values]))
    assert set(sent.abs().tolist()) <= {65504.0, 65472.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("can_undo", [False, True])
def test_conservation_over_fifty_steps_and_sizes_of_k(dtype: torch.dtype, can_undo: bool) -> None:
    n, generator = 70_001, torch.Generator().manual_seed(3)
    scale = torch.exp(3 * torch.randn(n, generator=generator))
    feedback = ErrorFeedback(n, selector("exact"), values=dtype, can_undo=can_undo)
    for step in range(50):
        gradient = scale * torch.randn(n, generator=generator)
        sums = gradient + feedback.residual
        k = k_of((0.001, 0.01, 0.3, 1.0)[step % 4], n)
        expected = selector("reference").select(sums, k).indices
        selection = feedback.select(gradient, k)
        assert torch.equal(selection.indices, expected)
        assert same_bits(added_up(selection, feedback.residual), sums)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_undoing_gives_the_residual_back_whatever_the_gradient_held(name: str, odd: float) -> None:
    n, generator = 9000, torch.Generator().manual_seed(4)
    feedback = ErrorFeedback(n, selector(name), can_undo=True)
    feedback.select(torch.randn(n, generator=generator), 90)
    before = feedback.residual.clone()
    gradient = torch.randn(n, generator=generator)
    gradient[5000] = odd
    selection = feedback.select(gradient, 90)
    assert 5000 in selection.indices.tolist() and feedback.num_nonfinite == 1
    feedback.undo()
    assert same_bits(feedback.residual, before)
    with pytest.raises(RuntimeError, match="only once"):
        feedback.undo()
    gradient[5000] = 0.0
    sums = gradient + before
    assert same_bits(added_up(feedback.select(gradient, 90), feedback.residual), sums)


def test_without_memory_for_it_nothing_can_be_undone() -> None:
    feedback = ErrorFeedback(3, selector("exact"))
    feedback.select(torch.ones(3), 1)
    with pytest.raises(RuntimeError, match="can_undo"):
        feedback.undo()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_are_added_as_float32(dtype: torch.dtype) -> None:
    feedback = ErrorFeedback(4, selector("exact"))
    feedback.residual.copy_(torch.tensor([1e-6, 0, 0, 0]))
    selection = feedback.select(torch.tensor([1.0, 0, 0, 0], dtype=dtype), 1)
    assert selection.values.item() == torch.tensor(1.0) + torch.tensor(1e-6) != 1.0


def test_density_one_sends_everything() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    for name in SELECTORS:
        feedback = ErrorFeedback(1000, selector(name))
        selection = feedback.select(gradient, k_of(1, 1000))
        assert torch.equal(selection.values, gradient) and not feedback.residual.any()


def test_of_nothing_nothing_is_sent() -> None:
    for name in SELECTORS:
        assert ErrorFeedback(0, selector(name)).select(torch.empty(0), 0).indices.numel() == 0


@pytest.mark.parametrize(
    ("gradient", "k", "message"),
    [
        (torch.ones(4), 1, "4 elements and the residual 3"),
        (torch.ones(3, dtype=torch.float64), 1, "float64"),
        (torch.ones(3), 0, "0 of 3"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_and_change_nothing(
    gradient: torch.Tensor, k: int, message: str
) -> None:
    feedback = ErrorFeedback(3, selector("exact"), can_undo=True)
    feedback.residual.fill_(7.0)
    with pytest.raises(ValueError, match=message):
        feedback.select(gradient, k)
    assert feedback.residual.tolist() == [7.0] * 3


def test_a_dtype_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        ErrorFeedback(3, selector("exact"), values=torch.float64)
