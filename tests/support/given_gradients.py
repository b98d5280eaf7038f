"""A model whose gradients are exactly the numbers it is fed, to test what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class Given(nn.Module):
    """Zero parameters by name; `feed` gives each named one the stated gradient, others none."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        for name, (shape, dtype) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def feed(self, **values: float | complex) -> None:
        """One backward in which every element of the named parameters gets this gradient."""
        total = torch.zeros((), dtype=torch.float64)
        for name, value in values.items():
            param = self.get_parameter(name)
            # the inner product's gradient with respect to a complex parameter is its other factor
            other = torch.full_like(param, value)
            product = (param * other.conj()).sum() if param.is_complex() else (param * other).sum()
            total = total + (product.real if param.is_complex() else product).double()
        total.backward()
