"""Measurements on ranks: started on this machine, or this process as one of a job.

Nothing is written but the document that comes out: ranks work in a scratch folder, which goes away
unless a rank that failed left its last words there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.cluster import Cluster
from slipstream.errors import CostError
from slipstream.train.launch.joined import JoinedJob, shape
from slipstream.train.launch.scratch import temporary_files
from slipstream.train.launch.worker import call_task
from slipstream.train.recipe import Recipe

_TASKS = "slipstream.train.measuring"
PROFILE = f"{_TASKS}:profile_on_rank"
PROBE = f"{_TASKS}:probe_on_rank"
WANTED = "wanted.json"
RESULT = "result.json"


@dataclass(frozen=True)
class Measurement:
    """What is to be measured.

    task: PROFILE or PROBE. recipe: says how ranks are started and how long they wait for each
    other, for a profile also what they train. wanted: the task's own settings. check: looks at
    where the result goes, before anything is measured; raises SlipstreamError.
    """

    task: str
    recipe: Recipe
    wanted: Mapping[str, Any]
    check: Callable[[], None]


def measure_here(measurement: Measurement) -> str:
    """The document's text, measured by the recipe's ranks, started on this machine.

    Raises SlipstreamError for whatever ends the measurement, launch.Interrupted after a signal.
    """
    recipe = measurement.recipe
    if measurement.task == PROFILE:
        recipe.validate_for(recipe.world_size)
    elif recipe.world_size == 1:
        raise CostError("A single rank has no one to exchange gradients with; probe with two.")
    measurement.check()
    _prepare(measurement)
    from slipstream.train.launch.local import LOGS, launch

    cluster = Cluster.regular(recipe.cluster.nodes, recipe.cluster.ranks_per_node)
    with temporary_files():
        folder = Path(tempfile.mkdtemp(prefix="slipstream-measure-"))
    try:
        with temporary_files():
            (folder / WANTED).write_text(json.dumps(measurement.wanted), encoding="utf-8")
        launch(recipe, run_folder=folder, cluster=cluster, task=measurement.task)
        with temporary_files():
            text = (folder / RESULT).read_text(encoding="utf-8")
    except BaseException:
        if not (folder / LOGS).exists():
            shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    return text


def measure_in_job(
    measurement: Measurement, job: JoinedJob, *, nodes: int | None, per_node: int | None
) -> str:
    """The document's text, on every rank, measured as one rank of the job of torchrun or srun.

    nodes, per_node: how the job's ranks are divided, where not as they were started. Raises
    SlipstreamError; what rank 0 or a node's first rank cannot do fails all, naming it.
    """
    os.environ.update(job.variables)
    if job.world_size == 1:
        cluster = shape((1,), nodes, per_node)
        measurement.check()
        _prepare(measurement)
    else:
        from slipstream.train.launch.meeting import Meeting

        meeting = Meeting(job, measurement.recipe.sync.timeout_seconds)
        meeting.await_all()
        cluster = shape(meeting.ranks_per_node(), nodes, per_node)
        meeting.from_rank_zero("look at the output", _said(measurement.check))
        meeting.from_first_of_node("prepare the data", _said(lambda: _prepare(measurement)))
    with ExitStack() as stack:
        with temporary_files():
            made = tempfile.TemporaryDirectory(prefix="slipstream-measure-")
            folder = stack.enter_context(made)
            (Path(folder) / WANTED).write_text(json.dumps(measurement.wanted), encoding="utf-8")
        result = call_task(
            measurement.task,
            measurement.recipe,
            run_folder=Path(folder),
            cluster=cluster,
            resume=None,
        )
    text: str = result["document"]
    return text


def _prepare(measurement: Measurement) -> None:
    """Makes sure that what a profile trains on is there, and can be shared by its ranks."""
    if measurement.task != PROFILE:
        return
    from slipstream.data import prepare

    recipe = measurement.recipe
    prepare(recipe.data.dataset, Path(recipe.data.folder) if recipe.data.folder else None)


def _said(action: Callable[[], None]) -> Callable[[], str]:
    def act() -> str:
        action()
        return ""

    return act
