"""Stepping in parts is stepping at once, for every optimizer and every kind of parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from pipelined import Trainee, assert_same, pipelined_plan, sgd
from ranks import Rank, run_ranks
from slipstream.errors import SlipstreamError
from slipstream.sync import GradientSync
from slipstream.sync.deferred import SEPARABLE
from slipstream.sync.parts import Parts
from small_models import batch, loss_of, mlp, reseeded, weights


class Counting(optim.Optimizer):
    """Keeps its number of steps in the group, as some optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["step"])


def in_groups(model: nn.Module) -> optim.Optimizer:
    """Groups whose members come in different buckets, with rates of their own."""
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": params[::2], "lr": torch.tensor(0.01)},
        {"params": params[1::2], "lr": torch.tensor(0.001), "weight_decay": 0.0},
    ]
    return optim.AdamW(groups, foreach=False)


class Together(optim.SGD):
    """One number for all parameters, as Prodigy has: the sum of all gradients' norms."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).sum()
        for p in params:
            p.sub_(p.grad / norm)


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "SGD": lambda m: optim.SGD(m.parameters(), lr=0.1),
    "SGD foreach": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda m: optim.Adam(m.parameters(), lr=0.01),
    "Adam amsgrad": lambda m: optim.Adam(m.parameters(), lr=0.01, amsgrad=True, foreach=True),
    "AdamW fused": lambda m: optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "RMSprop": lambda m: optim.RMSprop(m.parameters(), lr=0.01, centered=True),
    "Adagrad": lambda m: optim.Adagrad(m.parameters(), lr=0.01),
    "Adadelta": lambda m: optim.Adadelta(m.parameters()),
    "Adamax": lambda m: optim.Adamax(m.parameters()),
    "ASGD": lambda m: optim.ASGD(m.parameters(), lr=0.1, t0=1.0),
    "Rprop": lambda m: optim.Rprop(m.parameters()),
    "NAdam": lambda m: optim.NAdam(m.parameters()),
    "RAdam": lambda m: optim.RAdam(m.parameters()),
    "Adafactor": lambda m: optim.Adafactor(m.parameters()),
    "in groups": in_groups,
    "a counter in the group": lambda m: Counting(m.parameters()),
}


def check(run: Callable[[Trainee], object], rtol: float = 1e-12, **options: Any) -> None:
    """Same weights under a plan that gathers and under one that does not, on two ranks."""

    def body(rank: Rank, pipelined: bool) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=pipelined, buckets=(2, 2), **options)
        run(trainee)
        return trainee.end()

    plain = run_ranks(lambda rank: body(rank, False), 2)
    assert_same(run_ranks(lambda rank: body(rank, True), 2), plain[0], rtol)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_in_parts(name: str) -> None:
    def run(trainee: Trainee) -> None:
        for step in range(4):
            trainee.train(step)
            for group in trainee.optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5

    check(run, optimizer=OPTIMIZERS[name], separable=name == "a counter in the group")


def test_muon_steps_in_parts() -> None:
    class Matrices(nn.Module):
        """Muon takes matrices and nothing else."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).double()
            reseeded(self, 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x)
            return out

    def run(trainee: Trainee) -> None:
        trainee.train(*range(4))

    # it orthogonalises in bfloat16, where a last bit of the average may become a visible one
    check(run, 1e-3, build=Matrices, optimizer=lambda m: optim.Muon(m.parameters(), lr=0.01))


def test_what_is_not_known_to_be_separable_is_refused_unless_it_is_stated() -> None:
    model = mlp()
    sync = GradientSync(model, plan=pipelined_plan(model))
    for optimizer in (Counting(model.parameters()), Together(model.parameters(), lr=0.1)):
        name = type(optimizer).__name__
        with pytest.raises(SlipstreamError, match=f"{name} is not known .* separable=True"):
            sync.deferred(optimizer)
    sync.deferred(Counting(model.parameters()), separable=True)
    sync.close()


def test_every_optimizer_of_torch_is_decided_about() -> None:
    """One that torch adds is refused until somebody has looked at it."""
    found = {
        kind
        for kind in vars(optim).values()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    }
    assert found - SEPARABLE == {optim.Optimizer, optim.LBFGS, optim.SparseAdam}


def test_sparse_adam_is_refused_as_averages_are_dense() -> None:
    model = mlp()
    sync = GradientSync(model, plan=pipelined_plan(model))
    with pytest.raises(SlipstreamError, match="averages over ranks are dense; use Adam"):
        sync.deferred(optim.SparseAdam(model.parameters()), separable=True)
    sync.close()


def test_sharing_a_number_between_parameters_would_have_been_wrong() -> None:
    """Why a subclass is not taken for what it derives from."""

    def run(trainee: Trainee) -> None:
        trainee.train(0, 1)

    with pytest.raises(AssertionError, match="not close"):
        check(run, optimizer=lambda m: Together(m.parameters(), lr=0.1), separable=True)


def test_a_schedule_made_on_the_users_optimizer_and_rates_that_are_tensors() -> None:
    def body(rank: Rank, pipelined: bool) -> tuple[torch.Tensor, float]:
        trainee = Trainee(rank, pipelined=pipelined, optimizer=in_groups)
        inner = getattr(trainee.optimizer, "_updates", None)
        schedule = optim.lr_scheduler.StepLR(
            inner.optimizer if inner else trainee.optimizer, 1, 0.5
        )
        for step in range(4):
            trainee.train(step)
            schedule.step()
        return trainee.end(), float(trainee.optimizer.param_groups[0]["lr"])

    (plain, rate), _ = run_ranks(lambda rank: body(rank, False), 2)
    found = run_ranks(lambda rank: body(rank, True), 2)
    assert_same([mine for mine, _ in found], plain)
    assert {rate for _, rate in found} == {rate}


def test_a_counter_in_the_group_counts_steps_and_not_parts() -> None:
    model = mlp()
    parts = Parts(Counting(model.parameters()))
    optimizer = parts._optimizer
    loss_of(model, batch(0)).backward()
    for expected in (1, 2):
        parts.remember()
        optimizer.param_groups[0]["lr"] = 0.3 + expected
        for param in model.parameters():
            parts.step([param])
        group = optimizer.param_groups[0]
        assert (group["step"], group["lr"]) == (expected, 0.3 + expected)
        assert group["params"] == list(model.parameters())


def test_parameters_outside_of_the_model_are_stepped_with_their_own_gradients_at_once() -> None:
    outside: dict[int, nn.Parameter] = {}

    def optimizer(model: nn.Module) -> optim.Optimizer:
        scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        outside[id(model)] = scale
        return optim.SGD([*model.parameters(), scale], lr=0.1)

    def run(trainee: Trainee) -> None:
        scale = outside[id(trainee.model)]
        for step in range(3):
            trainee.optimizer.zero_grad()
            (loss_of(trainee.model, batch(trainee.rank, step)) * scale).backward()
            before = scale.item()
            trainee.optimizer.step()
            assert scale.item() != before

    check(run, optimizer=optimizer)


def test_parameters_that_only_some_ranks_use_or_that_nobody_does() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 3) for _ in "ab"])

        def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
            out: torch.Tensor = torch.stack([self.heads[i](self.body(x)) for i in use])
            return out

    def run(trainee: Trainee) -> None:
        uses = [True, False, trainee.rank == 0, trainee.rank == 1, False, False]
        for step, use in enumerate(uses):
            trainee.optimizer.zero_grad()
            x = batch(trainee.rank, step)
            trainee.model(x, (0, 1) if use else (0,)).square().sum().backward()
            trainee.optimizer.step()

    check(run, build=lambda: reseeded(Branches().double(), 0))


class Odd(nn.Module):
    """Parameters of no elements, one, fewer and more than ranks; complex, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))
        self.turn = nn.Parameter(torch.tensor([1 + 2j, 0.5j, -1.0], dtype=torch.complex128))
        self.narrow = nn.Parameter(torch.linspace(-1, 1, 4))
        self.conv = nn.Conv2d(2, 5, 2).double().to(memory_format=torch.channels_last)
        reseeded(self.conv, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scalar * self.narrow.double()
        x = x + (self.turn * (1 - 0.5j)).imag.sum() + self.empty.sum()
        out: torch.Tensor = self.conv(x.view(-1, 2, 2, 2)).tanh()
        return out


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_of_every_shape_dtype_and_layout(world_size: int) -> None:
    def body(rank: Rank, pipelined: bool) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=pipelined, build=Odd, buckets=(3, 2), check_finite=True)
        for step in range(3):
            trainee.train(step)
            assert trainee.sync.nonfinite() is None
        trainee.sync.wait()
        for param in trainee.model.parameters():
            assert param.grad is not None and param.grad.stride() == param.stride()
        trainee.sync.close()
        real = [torch.view_as_real(p) if p.is_complex() else p for p in trainee.model.parameters()]
        return torch.cat([p.detach().double().reshape(-1) for p in real])

    plain = run_ranks(lambda rank: body(rank, False), world_size)
    found = run_ranks(lambda rank: body(rank, True), world_size)
    torch.testing.assert_close(found[0], plain[0], rtol=1e-6, atol=1e-6)
    wide = torch.ones(len(plain[0]), dtype=torch.bool)
    wide[7:11] = False  # `narrow` has 32 bits
    torch.testing.assert_close(found[0][wide], plain[0][wide], rtol=1e-6, atol=1e-9)
    assert all(torch.equal(mine, found[0]) for mine in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_are_averaged_in_32(dtype: torch.dtype) -> None:
    values = torch.tensor([[40000.0, 2**-12, 1.0], [40000.0, 2**-12, 2**-9], [1.0, 0.0, 2**-9]])

    def body(rank: Rank) -> torch.Tensor:
        model = nn.Linear(3, 1, bias=False, dtype=dtype)
        trainee = Trainee(rank, pipelined=True, build=lambda: model)
        model(values[rank.rank : rank.rank + 1].to(dtype)).sum().backward()
        trainee.sync.wait()
        assert model.weight.grad is not None
        trainee.sync.close()
        return model.weight.grad

    mean = (values.to(dtype).float().sum(0) / 3).to(dtype)
    for mine in run_ranks(body, 3):
        assert torch.equal(mine[0], mean)


def test_one_rank_gives_the_bits_of_the_unwrapped_model() -> None:
    def body(rank: Rank) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=True)
        trainee.train(*range(4))
        return trainee.end()

    model = mlp()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(0, step)).backward()
        optimizer.step()
    assert torch.equal(run_ranks(body, 1)[0], weights(model))
