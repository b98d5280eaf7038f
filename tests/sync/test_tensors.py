"""Whatever a parameter or its gradient looks like, the average is right and keeps its shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from averages import check_averages
from given_gradients import Given
from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.errors import UnsupportedModel
from slipstream.sync import GradientSync, NonFinite
from small_models import Gradients, assert_matches, batch, gradients, loss_of, mlp, reseeded

PLANNERS = ["wfbp", "single", "fixed", "ddp"]


def on_batch(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, batch(rank, step)).backward()


# -- empty and scalar parameters (case 14) ------------------------------------------------------

EMPTY: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "nothing": ((0, 8), torch.float64),
    "temperature": ((), torch.float64),
}
WEIGHT: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight": ((3, 2), torch.float64)}


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "shapes",
    [
        {**EMPTY, **WEIGHT},
        {**WEIGHT, **EMPTY},
        {**WEIGHT, "nothing": EMPTY["nothing"]},
        EMPTY,
        {"nothing": EMPTY["nothing"]},
        {"temperature": EMPTY["temperature"]},
    ],
    ids=["first", "last", "very-last", "only-those", "only-empty", "only-scalar"],
)
def test_empty_and_scalar_parameters_train(
    shapes: dict[str, Any], world_size: int, planner: str
) -> None:
    def feed(model: Given, rank: int, step: int) -> None:
        model.feed(**{name: float(rank + 2 * step) for name in shapes})

    check_averages(lambda: Given(shapes), feed, planner=planner, world_size=world_size)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("place", ["first", "last", "alone"])
def test_a_linear_layer_without_outputs_trains(place: str) -> None:
    """Beside a body only rank 0 uses it, and nobody in odd steps; alone everybody does."""

    def build() -> nn.ModuleDict:
        names = {"first": ("head", "body"), "last": ("body", "head"), "alone": ("head",)}[place]
        layers = nn.ModuleDict({n: nn.Linear(4, 0 if n == "head" else 3) for n in names})
        return reseeded(layers.double(), 0)

    def train(rank: Rank) -> tuple[list[bool], float, list[torch.Size]]:
        model = build()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norm, used = torch.zeros(()), []
        for step in range(4):
            optimizer.zero_grad()
            use_head = place == "alone" or (rank.rank == 0 and step % 2 == 0)
            layers = [m for n, m in model.items() if n == "body" or use_head]
            torch.stack([m(batch(rank.rank, step)).sum() for m in layers]).sum().backward()
            used.append(model["head"].weight.grad is not None)
            norm = sync.clip_grad_norm_(1.0)
            optimizer.step()
        sync.close()
        return used, float(norm), [param.shape for param in model.parameters()]

    zero, one = run_ranks(train, 2)
    assert zero == one
    assert zero[0] == ([True] * 4 if place == "alone" else [True, False] * 2)
    assert zero[1] == 0.0 if place == "alone" else zero[1] > 0.0
    assert zero[2] == [param.shape for param in build().parameters()]


# -- complex numbers (S2) -----------------------------------------------------------------------


class ComplexLinear(nn.Module):
    """10 -> 10 in complex numbers, with a real scale beside it, fed a conjugate."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10, dtype=dtype)
        self.scale = nn.Parameter(torch.zeros(10, dtype=dtype.to_real()))
        reseeded(self, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x.conj()) * self.scale
        return out.abs().square().mean()


@pytest.mark.parametrize("planner", ["single", "wfbp"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_linear_layer_fed_a_conjugate(dtype: torch.dtype, planner: str) -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 10, dtype=dtype, generator=generator)).backward()

    rtol = 1e-12 if dtype == torch.complex128 else 1e-5
    check_averages(lambda: ComplexLinear(dtype), backward, planner=planner, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_real_and_imaginary_parts_are_averaged_exactly(dtype: torch.dtype) -> None:
    def train(rank: Rank) -> torch.Tensor:
        model = Given({"z": ((3, 2), dtype)})
        sync = GradientSync(model, group=rank.group)
        model.feed(z=complex(2 + rank.rank, 8 - 4 * rank.rank))
        sync.close()
        grad = model.get_parameter("z").grad
        assert grad is not None and not grad.is_conj()
        return grad

    for grad in run_ranks(train, 2):
        assert torch.equal(grad, torch.full((3, 2), 2.5 + 6j, dtype=dtype))


def test_a_complex_parameter_that_one_rank_uses_and_an_infinite_imaginary_part() -> None:
    def train(rank: Rank) -> tuple[Gradients, Any]:
        model = Given({"z": ((2,), torch.complex64), "w": ((2,), torch.float32)})
        sync = GradientSync(model, group=rank.group, check_finite=True)
        model.feed(**({"z": 4j, "w": 1.0} if rank.rank == 1 else {"w": 3.0}))
        first = gradients(model)
        assert sync.nonfinite() is None
        model.feed(z=complex(0.0, float("inf") if rank.rank == 1 else 1.0), w=1.0)
        found = sync.nonfinite()
        sync.close()
        return first, found

    for first, found in run_ranks(train, 2):
        assert_matches(first, {"z": torch.tensor([2j, 2j]), "w": torch.tensor([2.0, 2.0])})
        assert found == NonFinite((1,), "z")


# -- sparse gradients (S3) ----------------------------------------------------------------------


class Words(nn.Module):
    """An embedding with sparse gradients and a layer behind it."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 10, sparse=sparse)
        self.out = nn.Linear(10, 2)
        reseeded(self.double(), 0)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table(words))
        return out.square().mean()


def on_words(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randint(0, 5 + rank, (7,), generator=generator)).backward()


@pytest.mark.filterwarnings("ignore:The gradient of 'table.weight' is sparse")
@pytest.mark.parametrize("planner", ["single", "wfbp"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sparse_embedding_gradients_are_averaged_dense(world_size: int, planner: str) -> None:
    check_averages(Words, on_words, planner=planner, world_size=world_size)


@pytest.mark.filterwarnings("ignore:The gradient of 'table.weight' is sparse")
def test_sparse_gradients_accumulate_and_train_like_dense_ones() -> None:
    def train(sparse: bool) -> Callable[[Rank], list[torch.Tensor]]:
        def body(rank: Rank) -> list[torch.Tensor]:
            model = Words(sparse)
            sync = GradientSync(model, group=rank.group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                with sync.no_sync():
                    on_words(model, rank.rank, 10 + step)
                on_words(model, rank.rank, step)
                on_words(model, rank.rank, 20 + step)
                optimizer.step()
            sync.close()
            return [param.detach() for param in model.parameters()]

        return body

    dense, sparse = run_ranks(train(False), 2), run_ranks(train(True), 2)
    for index, expected in enumerate(dense[0]):
        torch.testing.assert_close(sparse[0][index], expected, rtol=1e-12, atol=1e-15)
        assert torch.equal(sparse[0][index], sparse[1][index])


def test_the_notice_about_sparse_gradients_names_the_parameter_and_comes_once() -> None:
    plan = GradientSync(Words()).plan

    def train(rank: Rank) -> None:
        model = Words()
        sync = GradientSync(model, plan=plan, group=rank.group)
        for step in range(4):
            model.zero_grad()
            on_words(model, rank.rank, step)
        sync.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(train, 2)
    notices = [str(w.message) for w in caught]
    assert len(notices) == 2, "one a rank"
    assert all("'table.weight' is sparse" in n and "sparse=False" in n for n in notices)


# -- number types and sharing -------------------------------------------------------------------

MIXED: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "narrow": ((3,), torch.float32),
    "wide": ((2, 2), torch.float64),
    "coarse": ((5,), torch.bfloat16),
    "small": ((4,), torch.float16),
    "narrow_too": ((2,), torch.float32),
}


@pytest.mark.parametrize("planner", PLANNERS)
def test_parameters_of_four_dtypes_in_one_model(planner: str) -> None:
    def feed(model: Given, rank: int, step: int) -> None:
        model.feed(**{n: 2.0 * rank + i + step for i, n in enumerate(MIXED)})

    check_averages(lambda: Given(MIXED), feed, planner=planner, rtol=0.0)


def test_a_bucket_holds_one_dtype() -> None:
    sync = GradientSync(Given(MIXED), plan="single")
    lanes = [{MIXED[name][1] for name in bucket.gradients} for bucket in sync.plan.reduce]
    assert len(lanes) == 4 and all(len(lane) == 1 for lane in lanes)


@pytest.mark.parametrize(
    ("name", "values", "mean"),
    [("coarse", (256.0, 1.0, 1.0, 2.0), 65.0), ("small", (2048.0, 1.0, 1.0, 2.0), 513.0)],
)
def test_sixteen_bit_gradients_are_summed_in_32_bits(
    name: str, values: tuple[float, ...], mean: float
) -> None:
    """In 16 bits 256 + 1 is 256 again, and 2048 + 1 is 2048."""

    def train(rank: Rank) -> torch.Tensor:
        model = Given(MIXED)
        sync = GradientSync(model, group=rank.group)
        model.feed(**{name: values[rank.rank]})
        sync.close()
        grad = model.get_parameter(name).grad
        assert grad is not None
        return grad

    for grad in run_ranks(train, 4):
        assert grad.tolist() == [mean] * grad.numel()


def test_a_tied_parameter_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight
            reseeded(self.double(), 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(self.middle(self.first(x)).relu())
            return out

    sync = GradientSync(Tied())
    names = [name for bucket in sync.plan.reduce for name in bucket.gradients]
    assert names.count("first.weight") == 1 and "last.weight" not in names
    check_averages(Tied, on_batch)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("moment", ["after the wrap", "between steps", "with gradients there"])
def test_a_change_of_dtype_after_the_wrap_is_refused_by_name(moment: str, world_size: int) -> None:
    def train(rank: Rank) -> None:
        model = mlp()
        sync = GradientSync(model, plan="single", group=rank.group)
        for step in range(0 if moment == "after the wrap" else 2):
            model.zero_grad()
            on_batch(model, rank.rank, step)
        if moment == "between steps":
            model.zero_grad()
        model.float()
        try:
            model(batch(rank.rank).float()).sum().backward()
        finally:
            sync.close()

    for outcome in run_ranks_settled(train, world_size):
        assert isinstance(outcome, UnsupportedModel)
        assert "changed its dtype to torch.float32" in str(outcome)
        assert any(f"{name!r}" in str(outcome) for name, _ in mlp().named_parameters())
