"""Where in a forward each parameter is read first, from the autograd graph that it leaves.

A module's pre-hook tells when the module is called, but a parameter may be read outside of its own
module: `F.linear(x, self.other.weight)`, or the output projection inside torch's multi-head
attention, whose module is never called. Autograd numbers its nodes in the order in which forward
makes them, so the node that reads a parameter tells between which two calls that happened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
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


def first_points(
    owners: Mapping[str, int],
    calls: Sequence[tuple[int, int]],
    readers: Mapping[str, int],
) -> dict[str, int | None]:
    """For each parameter the watched module at whose call it must be there, by index.

    owners: the module that holds each parameter. calls: (autograd's number, module) of every call
    of one forward, in order. readers: of `first_readers`. None: nobody saw where it is read.
    """
    first_call: dict[int, int] = {}
    for number, module in calls:
        first_call.setdefault(module, number)
    numbers = [number for number, _ in calls]
    points: dict[str, int | None] = {}
    for name, owner in owners.items():
        reader = readers.get(name)
        called = first_call.get(owner)
        if reader is None or (called is not None and called <= reader):
            points[name] = owner if called is not None else None
            continue
        before = bisect_right(numbers, reader) - 1
        points[name] = calls[before][1] if before >= 0 else None
    return points
