"""``slipstream profile``: when the gradients of a recipe's step become ready."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.options import (
    NodesOption,
    OverwriteOption,
    PerNodeOption,
    RecipeArgument,
    SetOption,
)

if TYPE_CHECKING:
    from slipstream.trace import Trace


def profile(
    recipe: RecipeArgument = None,
    overrides: SetOption = None,
    nodes: NodesOption = None,
    per_node: PerNodeOption = None,
    steps: Annotated[
        int, typer.Option(min=1, max=10_000, help="Steps to record, after two for warming up.")
    ] = 20,
    output: Annotated[Path, typer.Option(help="The trace file to write.")] = Path("trace.json"),
    overwrite: OverwriteOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the trace file, alone on standard output.")
    ] = False,
) -> None:
    """Record a few steps of a recipe, without communication.

    Inside torchrun or srun this process joins the job as one of its ranks; elsewhere it starts
    the ranks itself, on this machine. Nothing of the training is kept.
    """
    from slipstream.cli.measuring import leave_job, measure
    from slipstream.trace import Trace
    from slipstream.train.launch.measure import PROFILE
    from slipstream.train.launch.request import DEFAULT_RECIPE
    from slipstream.train.recipe import load_recipe

    trace = measure(
        Trace,
        PROFILE,
        load_recipe(recipe or DEFAULT_RECIPE, overrides or ()),
        {"steps": steps},
        nodes=nodes,
        per_node=per_node,
        output=output,
        overwrite=overwrite,
        as_json=as_json,
    )
    if trace is not None and not as_json:
        _print(trace, output)
    leave_job()


def _print(trace: Trace, output: Path) -> None:
    from slipstream.words import count, duration, percent, size

    first = trace.gradients[0]
    backward_spread = trace.gradients[-1].ready_spread_seconds
    print(f"{trace.model}, {trace.batch_size} samples a rank. {trace.note}\n")
    print(f"{'part':<10}  {'median':>9}  {'spread':>9}")
    for part, seconds, spread in (
        ("input", trace.input_seconds, trace.input_spread_seconds),
        ("forward", trace.forward_seconds, trace.forward_spread_seconds),
        ("backward", trace.backward_seconds, backward_spread),
        ("update", trace.update_seconds, trace.update_spread_seconds),
    ):
        print(f"{part:<10}  {duration(seconds):>9}  {duration(spread):>9}")
    print(
        f"\n{count(len(trace.gradients))} gradients of {size(trace.bytes)}; the first, "
        f"{first.name}, is ready at {percent(first.ready_seconds / trace.backward_seconds)} of "
        "backward"
    )
    for warning in trace.warnings():
        print(warning)
    print(f"written to {output}")
