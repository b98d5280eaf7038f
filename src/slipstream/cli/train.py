"""``slipstream train``: train a recipe, on ranks of its own or as a rank of a job."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from slipstream.cli.output import print_document, print_summary, reserved_stdout
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.train.launch.joined import JoinedJob
    from slipstream.train.launch.request import Request


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A shipped recipe (fashion, digits) or a TOML file.  [default: fashion]"
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.FIELD=VALUE", help="Change a field of the recipe."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes; logical ones where ranks start here.")
    ] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of each node.")] = None,
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

    request = Request(recipe, overrides or (), nodes, per_node, run_folder, resume)
    job = find_job(os.environ)
    with reserved_stdout() as stdout:
        summary = _start_ranks(request) if job is None else _be_a_rank(request, job)
        if job is None or job.rank == 0:
            if as_json:
                print_document(summary, stdout)
            else:
                print_summary(summary, stdout)
            stdout.flush()
    if job is not None and job.world_size > 1:
        from slipstream.train.launch.leaving import leave

        leave(0)


def _start_ranks(request: Request) -> dict[str, Any]:
    from slipstream.train.launch.local import Interrupted
    from slipstream.train.launch.start import train_here

    try:
        return train_here(request)
    except Interrupted as stop:
        print(f"slipstream: {stop}", file=sys.stderr)
        raise typer.Exit(128 + stop.signal_number) from stop


def _be_a_rank(request: Request, job: JoinedJob) -> dict[str, Any]:
    """Train as a rank of the job around; a rank that fails leaves at once."""
    from slipstream.train.launch.start import train_in_job

    try:
        return train_in_job(request, job)
    except Exception as error:
        _leave(error, job.rank)


def _leave(error: Exception, rank: int) -> NoReturn:
    """Say what ended this rank, to the user and to its starter, and end the process."""
    from slipstream.train.launch.failure import write_error

    write_error(error)
    if not isinstance(error, SlipstreamError):
        traceback.print_exception(error)
    print(f"slipstream: rank {rank}: {error}", file=sys.stderr, flush=True)
    # Threads that still wait for a peer would keep a failed rank, and so the job, alive.
    os._exit(1)
