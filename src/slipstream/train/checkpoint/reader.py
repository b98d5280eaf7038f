"""A checkpoint in memory, every byte of it verified."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.layout import (
    BATCH,
    DATASET,
    RANKS,
    SAMPLES,
    SEED,
    require_same,
)
from slipstream.train.checkpoint.manifest import (
    MODEL,
    OPTIMIZER,
    STATE,
    Manifest,
    Position,
    check_files,
    read_manifest,
)
from slipstream.train.checkpoint.model_state import with_tied
from slipstream.train.checkpoint.optimizer_state import restore_layout
from slipstream.train.checkpoint.tensor_file import read_tensors
from slipstream.train.checkpoint.tree import COUNTERS, decode


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group: names of its parameters, and its options."""

    parameters: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The content of a checkpoint, on the CPU; nothing refers to its files any more.

    model: parameters and buffers by name, tied ones under each name (the same tensor), and extra
        state. optimizer_state: by parameter name. counters and tensors: as TrainState had them.
    """

    path: Path
    manifest: Manifest
    model: Mapping[str, Any]
    optimizer_state: Mapping[str, dict[str, Any]]
    optimizer_groups: tuple[SavedGroup, ...]
    counters: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.manifest.step

    @property
    def position(self) -> Position:
        """Where in the run it was saved, and the job's layout."""
        return self.manifest.position

    @property
    def plan(self) -> str | None:
        """The text of the plan in force."""
        return self.manifest.plan

    @property
    def recipe(self) -> str | None:
        """The text of the resolved recipe."""
        return self.manifest.recipe

    @property
    def metric(self) -> float | None:
        """The metric with which it was saved (higher is better)."""
        return self.manifest.metric

    def require_layout(
        self, *, world_size: int, global_batch_size: int, seed: int, dataset: str, num_samples: int
    ) -> None:
        """Raise CheckpointError, with both values, unless the job has the layout of the save.

        num_samples: of the training set. With another one, the job would go on in the middle of
        other samples or of another order.
        """
        saved = self.position
        require_same(
            self.path,
            (
                (DATASET, saved.dataset, dataset),
                (SAMPLES, saved.num_samples, num_samples),
                (SEED, saved.seed, seed),
                (BATCH, saved.global_batch_size, global_batch_size),
                (RANKS, saved.world_size, world_size),
            ),
        )

    def require_steps_per_epoch(self, steps_per_epoch: int) -> None:
        """Raise CheckpointError unless step and position name one place in such epochs."""
        saved = self.position
        whole = saved.epoch * steps_per_epoch + saved.step_in_epoch
        if saved.step_in_epoch > steps_per_epoch or whole != self.step:
            raise CheckpointError(
                f"checkpoint {self.path} stands at step {self.step}, and by its position at step"
                f" {saved.step_in_epoch} of epoch {saved.epoch + 1}, which cannot both be with"
                f" {steps_per_epoch} steps an epoch: resume with the data and the batch that it was"
                " saved with, or from another checkpoint."
            )


def load(path: Path) -> LoadedCheckpoint:
    """Read the checkpoint folder `path`; checksums of all files are verified.

    Raises CheckpointError naming the file and what is wrong with it. No code from the files runs
    (no pickle), and no more memory is taken than the files have bytes.
    """
    manifest = read_manifest(path)
    check_files(path, manifest)
    files = manifest.files
    stored = read_tensors(path / MODEL, files[MODEL])
    extra = {
        name: decode(value, stored, f"{path} {name}")
        for name, value in manifest.model.extra.items()
    }
    inside_extra = tuple(f"{name}/" for name in extra)
    named = {n: t for n, t in stored.items() if not n.startswith(inside_extra)}
    model = with_tied(named, manifest.model)
    optimizer = restore_layout(read_tensors(path / OPTIMIZER, files[OPTIMIZER]), manifest.optimizer)
    state = read_tensors(path / STATE, files[STATE])
    groups = tuple(
        SavedGroup(group.parameters, _decode_dict(group.options, optimizer, f"{path} group {i}"))
        for i, group in enumerate(manifest.optimizer.groups)
    )
    return LoadedCheckpoint(
        path=path,
        manifest=manifest,
        model={**model, **extra},
        optimizer_state={
            name: _decode_dict(entry, optimizer, f"{path} optimizer state of {name}")
            for name, entry in manifest.optimizer.state.items()
        },
        optimizer_groups=groups,
        counters=_decode_dict(manifest.counters, state, f"{path} counters"),
        tensors={n: t for n, t in state.items() if not n.startswith(COUNTERS)},
    )


def _decode_dict(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> dict[str, Any]:
    return {key: decode(value, tensors, f"{where}/{key}") for key, value in values.items()}
