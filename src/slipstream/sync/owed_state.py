"""What is owed as tensors with names, in checkpoints.

"PARAMETER@START"     float32 [n], owed of a gradient from its element START on, as elements lie
                      in memory in the layout that ranks agreed on
"PARAMETER@START+"    left over from second selections
"PARAMETER@START~"    velocities of momentum correction
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from slipstream.comm.sparse import Kind
from slipstream.errors import CheckpointError
from slipstream.sync.owed import Owed

ResidualState = dict[str, torch.Tensor]

_SUFFIXES: Mapping[Kind, str] = {"residual": "", "second": "+", "velocity": "~"}


def state_of(owed: Iterable[Owed], scale: float = 1.0) -> ResidualState:
    """Copies of what is owed, divided by the loss scale that is in it."""
    return {
        f"{piece.parameter}@{piece.start}{_SUFFIXES[piece.kind]}": piece.values / scale
        for piece in owed
    }


def owed_of_state(
    state: Mapping[str, torch.Tensor], numels: Mapping[str, int], scale: float = 1.0
) -> list[Owed]:
    """The same again, copied. numels: of the model's parameters, by name.

    Raises CheckpointError for what belongs to no parameter, or does not fit into one.
    """
    return [_piece(key, values, numels, scale) for key, values in state.items()]


def is_velocity(key: str) -> bool:
    """Whether it is a key of velocities, not of a residual."""
    return key.endswith(_SUFFIXES["velocity"])


def _piece(key: str, values: torch.Tensor, numels: Mapping[str, int], scale: float) -> Owed:
    kind: Kind = next((k for k, s in _SUFFIXES.items() if s and key.endswith(s)), "residual")
    name, _, start = key.removesuffix(_SUFFIXES[kind]).rpartition("@")
    first = int(start) if start.isascii() and start.isdigit() else -1
    if name not in numels or first < 0:
        raise CheckpointError(
            f"The residual {key!r} belongs to no parameter of this model; restore the one that "
            "was trained, or leave residuals out and lose what was not sent."
        )
    fits = values.dim() == 1 and first + values.numel() <= numels[name]
    if not fits or values.dtype != torch.float32 or not bool(values.isfinite().all()):
        raise CheckpointError(
            f"The residual {key!r} is {str(values.dtype).removeprefix('torch.')} "
            f"{list(values.shape)}, and what the parameter's {numels[name]:,} elements have "
            "room for is finite float32; the checkpoint is damaged or of another model."
        )
    return Owed(name, first, values.detach() * scale, kind)
