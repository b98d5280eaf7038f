"""Saving, loading and applying: bit for bit, by name, for any torch optimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.train.checkpoint import (
    CheckpointWriter,
    LoadedCheckpoint,
    Position,
    TrainState,
    apply,
    latest,
    load,
)

POSITION = Position(epoch=1, step_in_epoch=3, world_size=2, global_batch_size=8, seed=7)


class Two(nn.Module):
    """Two layers of one shape, declared in either order: case 38's model."""

    def __init__(self, *, swapped: bool = False, third: bool = False) -> None:
        super().__init__()
        for name in ("second", "first") if swapped else ("first", "second"):
            self.add_module(name, nn.Linear(4, 4))
        if third:
            self.third = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule("second")(torch.relu(self.get_submodule("first")(x)))
        x = self.third(x) if hasattr(self, "third") else x
        return x * self.scale + self.nothing.sum()


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def loss(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            value: Tensor = model(batch).square().mean()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(loss)


def save(folder: Path, model: nn.Module, optimizer: Optimizer, **state: Any) -> LoadedCheckpoint:
    with CheckpointWriter(folder) as writer:
        held = TrainState(model=model, optimizer=optimizer, position=POSITION, **state)
        done = writer.save(held, 3, block=True)
    assert done.path is not None, done.error
    assert latest(folder) == done.path
    return load(done.path)


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    theirs = b.state_dict()
    assert a.state_dict().keys() == theirs.keys()
    for name, tensor in a.state_dict().items():
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(tensor, theirs[name]), name


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.99), amsgrad=True),
    "adamw-tensor-rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), capturable=False),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resumed_equals_uninterrupted_bit_for_bit(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Two()
    optimizer = OPTIMIZERS[kind](whole.parameters())
    train(whole, optimizer, range(3))
    loaded = save(tmp_path, whole, optimizer)
    train(whole, optimizer, range(3, 8))
    torch.manual_seed(1)
    resumed = Two()
    again = OPTIMIZERS[kind](resumed.parameters())
    apply(loaded, resumed, again)
    train(resumed, again, range(3, 8))
    assert_same_weights(whole, resumed)
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
