"""What a checkpoint holds, and a consistent copy of it taken between two steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.manifest import (
    MODEL,
    OPTIMIZER,
    STATE,
    FileName,
    ModelRecord,
    OptimizerRecord,
    Position,
)
from slipstream.train.checkpoint.model_state import collect_model, parameters_by_name
from slipstream.train.checkpoint.optimizer_state import collect_optimizer
from slipstream.train.checkpoint.tensor_file import check_storable
from slipstream.train.checkpoint.tree import COUNTERS, add_tensor, encode


@dataclass(kw_only=True)
class TrainState:
    """The live state of a run, as the loop holds it; saving reads it and mutates nothing.

    position: where in the run this is, and for which layout of the job.
    counters: everything that is not a tensor (schedule, GradScaler.state_dict(), best metric):
        nested None, bool, int, float, str, list, tuple, dict; tensors inside are fine too.
    tensors: further tensors by name, such as random streams; per rank ones as "rank0/...".
    plan, recipe: their text, as it is to be found again.
    """

    model: nn.Module
    optimizer: Optimizer
    position: Position
    counters: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    plan: str | None = None
    recipe: str | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of a TrainState: CPU tensors by file and name, and the JSON-able rest.

    trained: names of the model's tensors that are parameters.
    """

    position: Position
    tensors: Mapping[FileName, Mapping[str, Tensor]]
    trained: frozenset[str]
    model: ModelRecord
    optimizer: OptimizerRecord
    counters: dict[str, JsonValue]
    plan: str | None
    recipe: str | None


class SnapshotBuffers:
    """CPU memory for snapshots, allocated once and reused while names and shapes stay.

    A snapshot is valid until the next `take` of the same object.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, state: TrainState) -> Snapshot:
        """Copy `state`; afterwards training may go on and change everything.

        Raises CheckpointError, naming the place, for state that a checkpoint cannot hold.
        """
        model_tensors: dict[str, Tensor] = {}
        optimizer_tensors: dict[str, Tensor] = {}
        state_tensors: dict[str, Tensor] = {}
        model = collect_model(state.model, model_tensors)
        optimizer = collect_optimizer(state.model, state.optimizer, optimizer_tensors)
        counters = {
            key: encode(value, f"{COUNTERS}{key}", state_tensors)
            for key, value in state.counters.items()
        }
        for name, tensor in state.tensors.items():
            if name.startswith(COUNTERS):
                raise CheckpointError(f"tensor {name!r} of the state: {COUNTERS} is taken, rename.")
            add_tensor(tensor, name, state_tensors)
        live: dict[FileName, dict[str, Tensor]] = {
            MODEL: model_tensors,
            OPTIMIZER: optimizer_tensors,
            STATE: state_tensors,
        }
        return Snapshot(
            position=state.position,
            tensors=self._copy(live),
            trained=frozenset(parameters_by_name(state.model)),
            model=model,
            optimizer=optimizer,
            counters=counters,
            plan=state.plan,
            recipe=state.recipe,
        )

    def _copy(
        self, live: Mapping[FileName, Mapping[str, Tensor]]
    ) -> dict[FileName, dict[str, Tensor]]:
        for file, tensors in live.items():
            for name, tensor in tensors.items():
                check_storable(f"{name} in {file}", tensor)
        # Buffers of names that are gone are freed here: only those of this save are kept.
        self._buffers = {
            (file, name): self._buffer(file, name, tensor)
            for file, tensors in live.items()
            for name, tensor in tensors.items()
        }
        with torch.no_grad():
            for file, tensors in live.items():
                for name, tensor in tensors.items():
                    self._buffers[file, name].copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensors in live.values() for tensor in tensors.values()):
            torch.cuda.synchronize()
        return {
            file: {name: self._buffers[file, name] for name in tensors}
            for file, tensors in live.items()
        }

    def _buffer(self, file: FileName, name: str, tensor: Tensor) -> Tensor:
        held = self._buffers.get((file, name))
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            return held
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def find_nonfinite(snapshot: Snapshot) -> str | None:
    """The first tensor that would poison a resumed run, or None.

    Parameters and optimizer state must be finite. A buffer may hold infinities (an attention mask)
    but no NaN.
    """
    for name, tensor in snapshot.tensors[MODEL].items():
        if not _is_healthy(tensor, infinity_allowed=name not in snapshot.trained):
            return name
    for name, tensor in snapshot.tensors[OPTIMIZER].items():
        if not _is_healthy(tensor, infinity_allowed=False):
            return f"optimizer state {name}"
    return None


def _is_healthy(tensor: Tensor, *, infinity_allowed: bool) -> bool:
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 2:
        tensor = tensor.float()  # the float8 kinds have no test of their own
    bad = torch.isnan(tensor) if infinity_allowed else ~torch.isfinite(tensor)
    return not bool(bad.any())
