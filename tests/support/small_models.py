"""Models, batches and comparisons that tests of the engine share.

Weights and batches come from generators of their own: ranks as threads share torch's global one.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)
Gradients = dict[str, torch.Tensor | None]


def reseeded(model: Model, seed: int) -> Model:
    """The model, in place, with weights that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) / 2)
    return model


def mlp(seed: int = 0) -> nn.Sequential:
    """4 -> 8 -> 6 -> 3 in 64 bits."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 3))
    return reseeded(layers.double(), seed)


def batch(rank: int, step: int = 0, size: int = 4) -> torch.Tensor:
    """[size, 4], float64; another one for each rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 4, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A mean over samples, so that a joined batch is the mean of its equal parts."""
    loss: torch.Tensor = model(x).square().mean()
    return loss


def gradients(model: nn.Module) -> Gradients:
    """Copies of the gradients by name; None where there is none."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters in one flat copy."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_matches(mine: Gradients, reference: Gradients, rtol: float = 1e-12) -> None:
    """Same names, None in the same places, values within `rtol` of a tensor's largest.

    Not of each value: a sum that nearly cancels has the rounding errors of what went into it, and
    convolutions sum in another order on every kind of processor and in every memory layout.
    """
    assert mine.keys() == reference.keys()
    for name, expected in reference.items():
        value: Any = mine[name]
        if expected is None or value is None:
            assert expected is None and value is None, name
        else:
            largest = float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol * largest)
