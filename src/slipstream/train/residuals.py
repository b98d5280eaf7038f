"""What sparse buckets have not sent yet, in checkpoints: "rank0/residual/PARAMETER@START", ...

Rank 0 writes checkpoints, so it gets the residuals of all ranks; their sizes go before, so that
every message has a known length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from slipstream.auto import GradientSync
from slipstream.comm.teams import Team
from slipstream.sync.owed_state import is_velocity
from slipstream.train.checkpoint import LoadedCheckpoint
from slipstream.train.distributed import Job
from slipstream.train.progress import Progress
from slipstream.words import counted

_DOING = "gathering what is still to be sent for a checkpoint"


def is_sparse(sync: GradientSync) -> bool:
    """Whether a plan of the run, past or future, sends gradients sparsely; alike on all ranks.

    Also where the engine has velocities, which dense plans have, too.
    """
    if sync.corrects_momentum:
        return True
    buckets = (bucket for _, plan in sync.plans for bucket in plan.reduce)
    return any(not isinstance(bucket.wire, str) for bucket in buckets)


def gather_residuals(sync: GradientSync, job: Job) -> dict[str, torch.Tensor]:
    """All ranks' residuals by name, on rank 0; nothing on the others, which all call it too.

    Raises RankFailure when a rank does not come.
    """
    if not is_sparse(sync):
        return {}
    mine = sync.residual_state()
    everyone = job.peers.gather({name: t.numel() for name, t in mine.items()}, _DOING)
    found = {_key(0, name): tensor for name, tensor in mine.items()}
    if job.group is None:
        return found
    team = Team(job.group, range(job.world_size))
    with job.named_failure(_DOING):
        if job.rank != 0:
            for tag, tensor in enumerate(mine.values()):
                team.send(tensor, 0, tag).wait()
            return {}
        for rank, sizes in enumerate(everyone[1:], start=1):
            for tag, (name, size) in enumerate(sizes.items()):
                found[_key(rank, name)] = tensor = torch.empty(size)
                team.receive(tensor, rank, tag).wait()
    return found


def sparse_record(sync: GradientSync, job: Job, progress: Progress) -> dict[str, Any] | None:
    """What sending sparsely took in the epoch under way; None where nothing was; all ranks call it.

    sent_bytes: between nodes, by all ranks in all steps, without headers; selection_seconds: of a
    step, the mean over ranks; compression: bytes of gradients for each byte that was selected from
    them; residual_norm: of what is still to be sent, in units of the averages.
    """
    if not is_sparse(sync):
        return None
    totals = sync.take_sparse_totals()
    state = sync.residual_state().items()
    owed = [values.double() for name, values in state if not is_velocity(name)]
    squares = sum(float(values.square().sum()) for values in owed)
    numbers = [
        totals.selection_seconds,
        float(totals.sent_bytes),
        totals.memory_bytes,
        totals.selected_bytes,
        squares,
    ]
    shared = job.sum(torch.tensor(numbers, dtype=torch.float64), "sharing what was sent")
    selecting, sent, memory, selected, squares = shared.tolist()
    if not selected:
        return None
    return {
        "kind": "sparse",
        "step": progress.step,
        "epoch": progress.epochs + 1,
        "sent_bytes": round(sent),
        "selection_seconds": selecting / (job.world_size * totals.steps),
        "compression": memory / selected,
        "residual_norm": squares**0.5,
    }


def restore_residuals(
    sync: GradientSync, job: Job, loaded: LoadedCheckpoint, note: Callable[[str], None]
) -> None:
    """Makes residuals those of the checkpoint; all ranks call it.

    note: gets a sentence where the checkpoint has none although the run sends sparsely. Raises
    CheckpointError for residuals that do not fit the model.
    """
    saved = [_of_rank(loaded.tensors, rank) for rank in range(loaded.position.world_size)]
    if any(saved):
        sync.load_residual_state(saved)
    elif is_sparse(sync) and loaded.step > 0:
        note(
            f"{loaded.path} holds no residuals, although this run sends gradients sparsely: what "
            f"its {counted(job.world_size, 'rank')} had not sent by step {loaded.step} is lost."
        )


def _key(rank: int, name: str) -> str:
    return f"rank{rank}/residual/{name}"


def _of_rank(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    start = _key(rank, "")
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
