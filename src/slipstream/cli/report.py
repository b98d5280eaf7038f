"""``slipstream report``: builds the HTML report of a run, finished or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.output import print_document


def report(
    run: Annotated[Path, typer.Argument(help="A run folder, as training prints it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Build RUN/report.html anew from what the run folder holds; works during a run, too."""
    from slipstream.report import build_report

    path = build_report(run)
    if as_json:
        print_document({"report": str(path)}, sys.stdout)
    else:
        print(f"report written to {path}")
