"""What is left of a run when it is over: one small document of numbers."""

from __future__ import annotations

import hashlib
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import RanksDiffer
from slipstream.train.distributed import Job
from slipstream.train.progress import Progress
from slipstream.train.recipe import Recipe

_UNIX_KIB = 1024


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the model's parameters and saved buffers.

    The order of declaration and the memory layout do not change it.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIX_KIB


def summarise(
    recipe: Recipe, job: Job, model: nn.Module, progress: Progress, run_folder: Path
) -> dict[str, Any]:
    """The run's summary, the same on every rank; all ranks call it, with buffers synchronised.

    train_seconds: training, evaluation and saving; images_per_second: trained images over that
    time; exposed and hidden communication: sums over all steps, mean over ranks; peak memory: of
    the largest rank, and of all together. Raises RanksDiffer if ranks hold different weights,
    which the engine's invariants rule out.
    """
    mine = [weights_sha256(model), peak_memory_bytes(), progress.train_seconds]
    everyone = job.peers.gather(mine, "summing up the run")
    digests, peaks, seconds = zip(*everyone, strict=True)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RanksDiffer(
                f"Rank {rank} ended with other weights than rank 0 although both averaged the same "
                "gradients; do not use them, and report this with the run folder."
            )
    run = progress.run
    return {
        "recipe": recipe.name,
        "model": recipe.model.name,
        "world_size": job.world_size,
        "nodes": job.cluster.nodes,
        "epochs": progress.epochs,
        "steps": progress.step,
        "skipped_steps": progress.skipped_steps,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "train_loss": run.mean_loss,
        "test_accuracy": progress.test_accuracy,
        "train_seconds": seconds[0],
        "images_per_second": run.samples / seconds[0],
        "exposed_communication_seconds": run.exposed_seconds,
        "hidden_communication_seconds": run.hidden_seconds,
        "input_wait_seconds": run.input_wait_seconds,
        "peak_memory_bytes": max(peaks),
        "peak_memory_bytes_all_ranks": sum(peaks),
        "weights_sha256": digests[0],
        "run_folder": str(run_folder),
    }
