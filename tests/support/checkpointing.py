"""What the checkpoint tests share: a small model in any declaration order, saving, comparing."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.train.checkpoint import (
    CheckpointWriter,
    LoadedCheckpoint,
    Position,
    TrainState,
    latest,
    load,
)

POSITION = Position(epoch=1, step_in_epoch=3, world_size=2, global_batch_size=8, seed=7)


class Two(nn.Module):
    """Two layers of one shape, declared in either order (case 38), a scalar, nothing, a buffer."""

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
    """One optimizer step for each number; the batch is a function of the number."""
    for step in steps:
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def loss(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            value: Tensor = model(batch).square().mean()
            value.backward()
            return value

        optimizer.step(loss)  # type: ignore[arg-type]


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    position: Position = POSITION,
    **state: Any,
) -> LoadedCheckpoint:
    """Save at step 3, and load what came of it."""
    with CheckpointWriter(folder) as writer:
        held = TrainState(model=model, optimizer=optimizer, position=position, **state)
        done = writer.save(held, 3, block=True)
    assert done.path is not None, done.error
    assert latest(folder) == done.path
    return load(done.path)


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    """Names, shapes and bits are equal."""
    theirs = b.state_dict()
    assert a.state_dict().keys() == theirs.keys()
    for name, tensor in a.state_dict().items():
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(tensor, theirs[name]), name
