"""Short training runs on made-up images: one process, or ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from ranks import Rank, gloo_group, run_ranks
from slipstream.cluster import Cluster
from slipstream.data import Batch, ImageSet
from slipstream.train.build import Data, deal
from slipstream.train.distributed import Job
from slipstream.train.loop import train
from slipstream.train.recipe import Recipe, parse_recipe
from slipstream.train.stopping import StopAgreement

RECIPE = """
name = "tiny"
[data]
dataset = "digits"
[augment]
crop_padding = 1
[model]
width = 4
[train]
epochs = 2
global_batch_size = 16
seed = 7
label_smoothing = 0.1
[optimizer]
learning_rate = 0.05
[schedule]
warmup_epochs = 1.0
[sync]
planner = "ddp"
[checkpoint]
keep_last = 3
[run]
log_every_steps = 2
"""


def tiny_recipe(*overrides: str) -> Recipe:
    """A recipe of 2 epochs of 5 steps on `tiny_images`, with overrides as on the command line."""
    return parse_recipe(RECIPE, "the test's recipe", overrides)


def tiny_images(num_samples: int = 80, seed: int = 0) -> ImageSet:
    """Random 8 x 8 images of three classes; a class shows in the brightness of a quadrant."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (num_samples,), generator=generator)
    images = torch.randint(0, 100, (num_samples, 1, 8, 8), generator=generator, dtype=torch.uint8)
    for sample, label in enumerate(labels.tolist()):
        images[sample, :, 4 * (label % 2) :, 4 * (label // 2) :] += 100
    return ImageSet("tiny", images, labels, ("a", "b", "c"))


Watch = Callable[[Batch, Job, "Request"], Batch]


@dataclass
class Request:
    """A stop request that a test makes at will."""

    requested: bool = False


def job_of(rank: Rank, *, timeout_seconds: float = 10.0) -> Job:
    """The job of a rank that is a thread, with a group of its own for gradients."""
    store = PrefixStore("gradients", rank.store)
    gradients = gloo_group(store, rank.rank, rank.world_size, timeout_seconds)
    return Job(
        rank.rank,
        Cluster((rank.world_size,)),
        group=rank.group,
        gradient_group=gradients,
        store=rank.store,
        timeout_seconds=timeout_seconds,
    )


@dataclass(frozen=True)
class WatchedData(Data):
    """Data whose batches pass through `watch(batch)`, which may return another batch or raise."""

    watch: Callable[[Batch], Batch] = lambda batch: batch

    @contextmanager
    def batches(self, epoch: int, start_step: int) -> Iterator[Iterator[Batch]]:  # type: ignore[override]
        """As `Data.batches`, watched."""
        with super().batches(epoch, start_step) as batches:
            yield map(self.watch, batches)


def watched(data: Data, watch: Callable[[Batch], Batch]) -> WatchedData:
    """The same data, each batch passed through `watch` as it is taken."""
    return WatchedData(**vars(data), watch=watch)


def run_one(
    recipe: Recipe,
    job: Job,
    folder: Path,
    *,
    watch: Watch | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Trains as one rank; `watch` sees each batch and may change it or ask to stop."""
    request = Request()
    data = deal(recipe, job, tiny_images(), tiny_images(22, seed=1))
    if watch is not None:
        data = watched(data, lambda batch: watch(batch, job, request))
    # Asked after every step, so that a test knows where a run ends.
    stop = StopAgreement(job, request, seconds_apart=0.0)
    return train(recipe, job, data, stop, run_folder=folder, resume=resume)


def run_all(
    recipe: Recipe,
    world_size: int,
    folder: Path,
    *,
    watch: Watch | None = None,
    resume: Path | None = None,
) -> list[dict[str, Any]]:
    """Trains on `world_size` ranks as threads; the summaries in rank order."""
    folder.mkdir(exist_ok=True)
    if world_size == 1:
        return [run_one(recipe, Job(0, Cluster((1,))), folder, watch=watch, resume=resume)]
    return run_ranks(
        lambda rank: run_one(recipe, job_of(rank), folder, watch=watch, resume=resume), world_size
    )
