"""Selection with torch's own operations: slow, and so short that it can be read."""

from __future__ import annotations

import torch

from slipstream.sparsify.selection import Selection, check, everything


class Reference:
    """The k largest by torch.topk; of equal ones those with the lowest index."""

    name = "reference"

    def select(self, values: torch.Tensor, k: int, draw: int = 0) -> Selection:
        """See `Selector`."""
        check(values, k)
        if k == values.numel():
            return everything(values)
        magnitudes = values.abs()
        least = torch.topk(magnitudes, k, sorted=True).values[-1]
        if least.isnan():
            larger, tied = torch.zeros_like(values, dtype=torch.bool), values.isnan()
        else:
            larger, tied = (magnitudes > least) | values.isnan(), magnitudes == least
        first_tied = tied.nonzero().flatten()[: k - int(larger.sum())]
        larger[first_tied] = True
        indices = larger.nonzero().flatten()
        return Selection(indices.to(torch.int32), values[indices])
