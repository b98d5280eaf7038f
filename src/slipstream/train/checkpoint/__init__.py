"""Checkpoints: complete or absent, verified when read, restored by name, written behind training.

Save: `CheckpointWriter.save(TrainState(...), step, metric)`. Resume: `latest(folder)`,
`load(path)`, `loaded.require_layout(...)`, `apply(loaded, model, optimizer)`.
Weights alone: `export_weights`. What is promised about kills, full disks and other jobs
stands in `store` and `writer`.
"""

from slipstream.train.checkpoint.apply import apply
from slipstream.train.checkpoint.export import export_weights
from slipstream.train.checkpoint.manifest import Position
from slipstream.train.checkpoint.random_streams import (
    capture_random_streams,
    restore_random_streams,
)
from slipstream.train.checkpoint.reader import LoadedCheckpoint, load
from slipstream.train.checkpoint.snapshot import TrainState
from slipstream.train.checkpoint.stop import StopSignal
from slipstream.train.checkpoint.store import find_checkpoint, latest
from slipstream.train.checkpoint.writer import CheckpointWriter, Save

__all__ = [
    "CheckpointWriter",
    "LoadedCheckpoint",
    "Position",
    "Save",
    "StopSignal",
    "TrainState",
    "apply",
    "capture_random_streams",
    "export_weights",
    "find_checkpoint",
    "latest",
    "load",
    "restore_random_streams",
]
