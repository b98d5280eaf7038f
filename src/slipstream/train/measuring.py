"""What a rank does for `slipstream profile` and `slipstream probe`, called as `run_training` is.

What is wanted lies as JSON in the run folder, a scratch folder of this machine; rank 0 leaves the
document there, and every rank returns it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slipstream.cluster import Cluster
from slipstream.data import Batch
from slipstream.documents import Document
from slipstream.durable import write_text_atomic
from slipstream.errors import CostError
from slipstream.measure import OPERATIONS, probe, profile, ways_of
from slipstream.plan.sparsity import Sparsity
from slipstream.sync import GradientSync
from slipstream.trace import Trace
from slipstream.train.build import Data, build_data, build_model, build_optimizer, build_schedule
from slipstream.train.distributed import Job, join_job
from slipstream.train.launch.measure import RESULT, WANTED
from slipstream.train.launch.scratch import temporary_files
from slipstream.train.loop import set_threads
from slipstream.train.recipe import Recipe
from slipstream.train.step import Stepper, windows


def profile_on_rank(
    recipe: Recipe, *, run_folder: Path, cluster: Cluster, resume: Path | None = None
) -> dict[str, Any]:
    """Profiles the recipe as one rank of the job around this process; wanted: `steps`."""
    wanted = json.loads((run_folder / WANTED).read_text(encoding="utf-8"))
    with join_job(cluster, timeout_seconds=recipe.sync.timeout_seconds) as job:
        set_threads(recipe, job)
        with job.telling_peers("profiling"):
            recipe.validate_for(job.world_size)
            data = build_data(recipe, job)
            alone: dist.ProcessGroup | None = None
            if job.world_size > 1:
                made = dist.new_group([job.rank], use_local_synchronization=True)
                assert isinstance(made, dist.ProcessGroup)
                alone = made
            trace = profile_recipe(recipe, job, data, alone, steps=wanted["steps"])
            return _handed_over(trace, job, run_folder)


def probe_on_rank(
    recipe: Recipe, *, run_folder: Path, cluster: Cluster, resume: Path | None = None
) -> dict[str, Any]:
    """Probes the cluster as one rank of the job around this process.

    wanted: `seconds`, `collectives`, `wires`, and `sparse`: of each sparse sum what a
    `Sparsity` is made of.
    """
    wanted = json.loads((run_folder / WANTED).read_text(encoding="utf-8"))

    def tell(text: str) -> None:
        print(f"slipstream: {text}", file=sys.stderr, flush=True)

    with join_job(cluster, timeout_seconds=recipe.sync.timeout_seconds) as job:
        if job.group is None:
            raise CostError("A single rank has no one to exchange gradients with; probe with two.")
        set_threads(recipe, job)
        with job.telling_peers("probing"):
            spec = probe(
                job.group,
                cluster,
                seconds=wanted["seconds"],
                operations=OPERATIONS,
                ways=(
                    *ways_of(cluster, wanted["collectives"], wanted["wires"]),
                    *(
                        (sparsity.collective, sparsity.wire)
                        for sparsity in (Sparsity(**fields) for fields in wanted["sparse"])
                    ),
                ),
                device=job.device,
                store=job.store,
                timeout_seconds=job.timeout_seconds,
                tell=tell if job.rank == 0 else lambda _: None,
            )
            return _handed_over(spec, job, run_folder)


def profile_recipe(
    recipe: Recipe,
    job: Job,
    data: Data,
    alone: dist.ProcessGroup | None,
    *,
    steps: int,
) -> Trace:
    """The trace of the recipe's own steps, with everything in them but the other ranks.

    alone: a group of this rank alone, over which the engine averages, so that its copying is part
    of the step and no communication is; None where there is one rank. The ranks run at once, each
    on its own samples, and share cores as in training.
    """
    model = build_model(recipe, data.train, job.device)
    optimizer = build_optimizer(recipe, model)
    sync = GradientSync(model, group=alone, check_finite=True)
    stepper = Stepper(
        model,
        optimizer,
        sync,
        build_schedule(recipe, data.sampler.steps_per_epoch),
        recipe.train,
        device=job.device,
    )
    model.train()
    numbers = itertools.count()
    with closing(_endless(data)) as stream:

        def step() -> None:
            window = next(stream)
            stepper.clock.begin()
            number = next(numbers)
            stepper.run(window, step=number, update=number)

        trace = profile(
            model,
            step,
            steps=steps,
            name=recipe.model.name,
            batch_size=recipe.train.global_batch_size // job.world_size,
            group=job.group,
            store=job.store,
            timeout_seconds=job.timeout_seconds,
        )
    sync.close()
    return trace


def _endless(data: Data) -> Generator[list[Batch]]:
    """The micro-batches of one step after the other, over as many epochs as are asked for."""
    for epoch in itertools.count():
        with data.batches(epoch, 0) as batches:
            yield from windows(batches, data.sampler.accumulation_steps)


def _handed_over(document: Document, job: Job, run_folder: Path) -> dict[str, Any]:
    def save() -> None:
        with temporary_files():
            write_text_atomic(run_folder / RESULT, document.to_json())

    job.on_rank_zero(save, "writing the result")
    return {"document": document.to_json()}
