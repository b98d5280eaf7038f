"""``slipstream train``: train a recipe, on ranks of its own or as a rank of a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import NodesOption, PerNodeOption, RecipeArgument, SetOption
from slipstream.cli.output import print_document, print_summary, reserved_stdout
from slipstream.cli.ranks import as_rank, on_own_ranks


def train(
    recipe: RecipeArgument = None,
    overrides: SetOption = None,
    nodes: NodesOption = None,
    per_node: PerNodeOption = None,
    run_folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; must be new.  [default: runs/RECIPE-TIME]"),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Go on with a run: its folder, or one of its checkpoints."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, alone on standard output.")
    ] = False,
) -> None:
    """Train a recipe.

    Inside torchrun or srun this process joins the job as one of its ranks; elsewhere it starts
    the ranks itself, on this machine. Ctrl-C or SIGTERM saves a checkpoint and ends the run.
    """
    from slipstream.train.launch.joined import find_job
    from slipstream.train.launch.request import Request
    from slipstream.train.launch.start import train_here, train_in_job

    request = Request(recipe, overrides or (), nodes, per_node, run_folder, resume)
    job = find_job(os.environ)
    with reserved_stdout() as stdout:
        if job is None:
            summary = on_own_ranks(lambda: train_here(request))
        else:
            summary = as_rank(lambda: train_in_job(request, job), job.rank)
        if job is None or job.rank == 0:
            if as_json:
                print_document(summary, stdout)
            else:
                print_summary(summary, stdout)
            stdout.flush()
    if job is not None and job.world_size > 1:
        from slipstream.train.launch.leaving import leave

        leave(0)
