"""``slipstream lab``: a command on an emulated cluster."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.options import OverwriteOption
from slipstream.cli.output import print_document
from slipstream.errors import LabError

if TYPE_CHECKING:
    from slipstream.lab import Cut


_Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND", help="What to run as every rank.")
]
_Rate = Annotated[
    str, typer.Option(metavar="RATE", help="Of each node's link, both ways: 100mbit, 1gbit.")
]
_IntraRate = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="What the ranks of a node may move among themselves.  [default: as it goes]",
    ),
]
_CutNode = Annotated[
    str | None, typer.Option(metavar="NODE", help="Take the link of node0, node1, ... down.")
]
_After = Annotated[
    str | None, typer.Option(metavar="TIME", help="When to cut, from the command's start: 5s.")
]
_Torchrun = Annotated[
    bool,
    typer.Option(
        "--torchrun", help="Start torchrun on each node, not the ranks with its variables."
    ),
]
_Logs = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Keep what ranks other than 0 print.  [default: go with the lab]"
    ),
]
_Timeout = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="The longest that COMMAND may run.  [default: no limit]"),
]
_Grace = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="What ranks have to end after a signal or another's failure."
    ),
]
_Check = Annotated[
    bool, typer.Option("--check/--no-check", help="Measure the links before the command.")
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, alone on standard output.")
]


def lab(
    command: _Command,
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.")],
    rate: _Rate,
    per_node: Annotated[int, typer.Option(help="Ranks of each node.")] = 1,
    intra_rate: _IntraRate = None,
    cut: _CutNode = None,
    after: _After = None,
    torchrun: _Torchrun = False,
    logs: _Logs = None,
    overwrite: OverwriteOption = False,
    timeout: _Timeout = None,
    grace: _Grace = "60s",
    check: _Check = True,
    as_json: _AsJson = False,
) -> None:
    """Run a command on an emulated cluster: a network of a given rate on this one machine.

    The command starts as one torchrun job, RANK and the like set. Rank 0 prints here. All nodes
    share the cores and the files of this machine; the links have a rate and no latency of their
    own. Runs as root, or where users may make namespaces; needs iproute2.
    """
    from slipstream.lab import LabInterrupted, LabSettings, parse_rate, parse_seconds, run_lab

    settings = LabSettings(
        nodes=nodes,
        ranks_per_node=per_node,
        rate_bits_per_second=parse_rate(rate),
        command=tuple(command),
        intra_rate_bits_per_second=None if intra_rate is None else parse_rate(intra_rate),
        cut=_cut(cut, after),
        grace_seconds=parse_seconds(grace),
        limit_seconds=None if timeout is None else parse_seconds(timeout),
        agents=torchrun,
        check=check,
    )
    try:
        result = run_lab(settings, logs=logs, overwrite=overwrite, output_to_stderr=as_json)
    except LabInterrupted as stop:
        print(f"slipstream: {stop}", file=sys.stderr)
        raise typer.Exit(128 + stop.signal_number) from stop
    if as_json:
        print_document(result.to_dict(), sys.stdout)
    raise typer.Exit(result.exit_code)


def _cut(node: str | None, after: str | None) -> Cut | None:
    from slipstream.lab import Cut, parse_seconds

    if node is None and after is None:
        return None
    if node is None or after is None:
        raise LabError("--cut and --after belong together, as in --cut node1 --after 5s")
    match = re.fullmatch(r"node(\d{1,9})", node)
    if match is None:
        raise LabError(f"--cut {node} names no node: they are node0, node1 and so on")
    return Cut(int(match[1]), parse_seconds(after))
