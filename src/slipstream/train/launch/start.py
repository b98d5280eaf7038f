"""From a request to its summary: ranks started on this machine, or this process as one of a job.

Everything that a user can have wrong is looked at here, before any rank works and before anything
is written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from slipstream.cluster import Cluster
from slipstream.train.launch.interruption import Interrupted
from slipstream.train.launch.joined import JoinedJob, shape
from slipstream.train.launch.request import (
    Request,
    kept_only_if_begun,
    make_folder,
    read_summary,
    resolve,
    way_on,
    way_on_told,
)
from slipstream.train.launch.worker import TRAINING, call_task
from slipstream.train.recipe import Recipe


def train_here(request: Request) -> dict[str, Any]:
    """Train with ranks started on this machine; the summary.

    Raises SlipstreamError for whatever ends the run, and launch.Interrupted after a signal.
    """
    run = resolve(request)
    wanted = {"cluster.nodes": request.nodes, "cluster.ranks_per_node": request.per_node}
    recipe = run.recipe.replace({key: ranks for key, ranks in wanted.items() if ranks is not None})
    recipe.validate_for(recipe.world_size)
    _tell_ignored(recipe)
    _prepare_data(recipe)
    from slipstream.train.launch.local import launch

    folder = run.folder or make_folder(recipe)
    cluster = Cluster.regular(recipe.cluster.nodes, recipe.cluster.ranks_per_node)
    try:
        with kept_only_if_begun(folder, is_new=run.folder is None), way_on_told(folder):
            launch(recipe, run_folder=folder, cluster=cluster, resume=run.checkpoint)
    except Interrupted as stop:
        said = "--resume" in str(stop)  # by a rank
        way = "" if said else f" {way_on(folder) or 'Nothing was saved.'}"
        raise Interrupted(stop.signal_number, f"{stop}{way}") from stop
    return read_summary(folder)


def train_in_job(request: Request, job: JoinedJob) -> dict[str, Any]:
    """Train as one rank of a job that torchrun or srun started; the summary, on every rank.

    Raises SlipstreamError; what rank 0 or a node's first rank cannot do fails all, naming it.
    """
    os.environ.update(job.variables)
    run = resolve(request, joined=True)
    if job.world_size == 1:
        meeting = None
        cluster = shape((1,), request.nodes, request.per_node)
    else:
        from slipstream.train.launch.meeting import Meeting

        meeting = Meeting(job, run.recipe.sync.timeout_seconds)
        meeting.await_all()
        cluster = shape(meeting.ranks_per_node(), request.nodes, request.per_node)
    recipe = run.recipe
    if len(set(cluster.ranks_per_node)) == 1:
        recipe = recipe.replace(
            {
                "cluster.nodes": cluster.nodes,
                "cluster.ranks_per_node": cluster.ranks_per_node[0],
            }
        )
    recipe.validate_for(cluster.world_size)

    def folder_of_run() -> str:
        _tell_ignored(recipe)
        return str(run.folder or make_folder(recipe))

    def prepare_data() -> str:
        _prepare_data(recipe)
        return ""

    if meeting is None:
        prepare_data()
        folder = Path(folder_of_run())
    else:
        meeting.from_first_of_node("prepare the data", prepare_data)
        folder = Path(meeting.from_rank_zero("make the run folder", folder_of_run))
    is_new = run.folder is None and job.rank == 0
    with kept_only_if_begun(folder, is_new=is_new), way_on_told(folder):
        return call_task(
            TRAINING, recipe, run_folder=folder, cluster=cluster, resume=run.checkpoint
        )


def _prepare_data(recipe: Recipe) -> None:
    from slipstream.data import prepare

    prepare(recipe.data.dataset, Path(recipe.data.folder) if recipe.data.folder else None)


def _tell_ignored(recipe: Recipe) -> None:
    for note in recipe.ignored():
        print(f"slipstream: note: {note}", file=sys.stderr)
