"""However a forward reads its parameters, it reads them up to date."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipelined import pipelined_plan, sgd
from slipstream.errors import SlipstreamError
from slipstream.sync import GradientSync
from small_models import batch, reseeded, weights


class Layers(nn.Module):
    """Two hidden layers; subclasses read them in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        reseeded(self.double(), 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(self.second(self.first(x)).tanh())
        return out


class Tied(Layers):
    """The last layer's weight is read at the start, the first one's at the end once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.third.weight.t())
        out: torch.Tensor = F.linear(self.third(self.second(x)), self.first.weight)
        return out


class Shared(Layers):
    """One parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 5).double()
        self.again.weight = self.first.weight
        reseeded(self, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.again(super().forward(x)).tanh()
        return out


class Loose(Layers):
    """Parameters in a container, of the model itself, and read inside attention's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.full((4,), 0.5), torch.full((4,), 2.0)])
        self.own = nn.Parameter(torch.ones(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        reseeded(self.double(), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x * self.list[0] + self.own) + self.list[1]
        out: torch.Tensor = self.attention(x[None], x[None], x[None])[0]
        return out


class Recomputed(Layers):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(
            lambda y: self.second(y).tanh(),
            x,
            use_reentrant=self.reentrant,
            preserve_rng_state=False,
        )
        out: torch.Tensor = self.third(x)
        return out


class RecomputedReentrant(Recomputed):
    reentrant = True


class Scripted(Layers):
    """A part in TorchScript, which calls no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), batch(0))
        reseeded(self, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.part(x))


class Varying(Layers):
    """Every other forward leaves a layer out."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.first(x)
        out: torch.Tensor = self.third(self.second(x) if self.count % 2 else x)
        return out


def train(
    build: Callable[[], nn.Module],
    deferred: bool,
    steps: int = 4,
    prepare: Callable[[nn.Module], Any] = lambda model: model,
    before: Callable[[nn.Module, int], object] = lambda model, step: None,
) -> tuple[torch.Tensor, GradientSync]:
    """The weights after some steps on one rank, with or without updates that are put off."""
    model = build()
    sync = GradientSync(model, plan=pipelined_plan(model) if deferred else "wfbp")
    optimizer: torch.optim.Optimizer = sgd(model)
    if deferred:
        optimizer = sync.deferred(optimizer)
    run = prepare(model)
    for step in range(steps):
        before(model, step)
        optimizer.zero_grad()
        run(batch(0, step)).square().mean().backward()
        optimizer.step()
    sync.flush()
    return weights(model), sync


@pytest.mark.parametrize(
    "build", [Layers, Tied, Shared, Loose, Recomputed, RecomputedReentrant, Varying]
)
def test_every_way_to_read_a_parameter(build: Callable[[], nn.Module]) -> None:
    found, _ = train(build, deferred=True)
    torch.testing.assert_close(found, train(build, deferred=False)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_torchscript() -> None:
    found, sync = train(Scripted, deferred=True)
    torch.testing.assert_close(found, train(Scripted, deferred=False)[0], rtol=1e-12, atol=1e-14)
    assert {"part.0.weight", "part.0.bias"} <= set(sync._watch._others)


def test_only_what_is_read_elsewhere_is_updated_at_the_start() -> None:
    assert train(Layers, True)[1]._watch._others == []
    assert train(Shared, True)[1]._watch._others == []
    assert set(train(Tied, True)[1]._watch._others) == {
        "third.weight",
        "first.weight",
        "first.bias",
    }
    loose = {"list.0", "list.1", "attention.out_proj.weight", "attention.out_proj.bias"}
    assert set(train(Loose, True)[1]._watch._others) == loose
    assert train(Recomputed, True)[1]._watch._others == []


def test_a_read_behind_the_hooks_back_is_told_and_never_trained_on() -> None:
    def call_method(model: nn.Module, step: int) -> None:
        if step == 2:
            second = model.second
            assert isinstance(second, nn.Linear)
            model.second = nn.Module()
            model.second.__dict__["forward"] = second.forward
            model.second.__class__ = type("Bare", (nn.Module,), {"__call__": second.forward})

    with pytest.raises(SlipstreamError, match=r"read parameter 'second\.(bias|weight)' before"):
        train(Layers, deferred=True, before=call_method)


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("scope", ["outside", "in place", "a part", "late"])
def test_torch_compile(fresh_compiler: None, scope: str) -> None:
    def prepare(model: nn.Module) -> Any:
        if scope == "outside":
            return torch.compile(model, backend="aot_eager")
        part = model if scope == "in place" else model.second
        assert isinstance(part, nn.Module)
        if scope != "late":
            part.compile(backend="aot_eager")
        return model

    def before(model: nn.Module, step: int) -> None:
        if scope == "late" and step == 2:
            model.compile(backend="aot_eager")

    found, _ = train(Layers, deferred=True, prepare=prepare, before=before, steps=5)
    reference, _ = train(Layers, deferred=False, steps=5)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-14)
