"""What is done to every gradient that autograd hands over, whatever becomes of it afterwards."""

from __future__ import annotations

import warnings
from typing import Protocol

import torch

from slipstream.errors import UnsupportedModel


class Place(Protocol):
    """Where a parameter's gradient goes. told_sparse: the user knows that it is sparse."""

    name: str
    told_sparse: bool


class Divisors:
    """Divides by the number of ranks; by a multiplication where that gives the same bits.

    A division takes several times as long as the memory that it reads, and a number in Python is
    made a tensor of the right dtype at every use, which in a hook, where nothing of it is in the
    processor's caches, takes longer than dividing a bias. So the factors are tensors.
    """

    def __init__(self, world_size: int) -> None:
        is_power_of_two = world_size & (world_size - 1) == 0
        self._apply = torch.mul if is_power_of_two else torch.div
        self._operand = 1 / world_size if is_power_of_two else world_size
        self._operands: dict[torch.dtype, torch.Tensor] = {}

    def divide(self, source: torch.Tensor, *, out: torch.Tensor) -> None:
        """Overwrites `out` with source / number of ranks; both have one dtype and shape."""
        operand = self._operands.get(out.dtype)
        if operand is None:
            operand = torch.tensor(self._operand, dtype=out.dtype)
            self._operands[out.dtype] = operand
        self._apply(source, operand, out=out)


def unusable(place: Place, grad: torch.Tensor) -> UnsupportedModel:
    """The error for a gradient that is differentiable itself, or of another dtype than planned."""
    if grad.requires_grad:
        return UnsupportedModel(
            f"The gradient of {place.name!r} was made with create_graph=True; averages over "
            "ranks are not differentiable. Use torch.autograd.grad for higher-order terms and "
            "keep the final backward plain."
        )
    return UnsupportedModel(
        f"Parameter {place.name!r} changed its dtype to {grad.dtype} after GradientSync was "
        "made; close it and make another after converting the model."
    )


def warn_sparse(place: Place) -> None:
    """Tells once that a sparse gradient is made dense."""
    if place.told_sparse:
        return
    place.told_sparse = True
    warnings.warn(
        f"The gradient of {place.name!r} is sparse; it is made dense to be averaged. Set "
        "sparse=False in its embedding to avoid the conversion.",
        stacklevel=2,
    )
