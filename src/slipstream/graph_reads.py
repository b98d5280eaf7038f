"""Which node of an autograd graph reads a parameter first.

Autograd numbers its nodes in the order in which a forward makes them, in each thread. So the number
of the node that reads a parameter tells between which two calls of modules that happened, also
where a parameter is read outside of its own module: `F.linear(x, self.other.weight)`, or the output
projection inside torch's multi-head attention, whose module is never called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

sequence_number = torch._C._autograd._get_sequence_nr
"""The number that autograd will give to the next node that this thread makes."""


def output_nodes(output: object) -> list[Any]:
    """The autograd nodes that made the tensors in a module's output, in any nesting."""
    tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def first_readers(nodes: Iterable[Any], names: Mapping[int, str]) -> dict[str, int]:
    """The number of the first node that reads each parameter, by name, in the graph behind `nodes`.

    names: by id() of the parameter. Parameters that the graph does not show are left out.
    """
    found: dict[str, int] = {}
    seen = set(nodes)
    ahead = list(seen)
    while ahead:
        node = ahead.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            name = names.get(id(getattr(following, "variable", None)))
            if name is not None:
                number = node._sequence_nr()
                found[name] = min(number, found.get(name, number))
            elif following not in seen:
                seen.add(following)
                ahead.append(following)
    return found
