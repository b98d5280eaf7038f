"""``slipstream``: one sub-command a file, each importing what it needs only when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from slipstream import __version__
from slipstream.cli.export import export
from slipstream.cli.lab import lab
from slipstream.cli.output import end_by_refusal, open_streams
from slipstream.cli.plan import plan
from slipstream.cli.probe import probe
from slipstream.cli.profile import profile
from slipstream.cli.report import report
from slipstream.cli.simulate import simulate
from slipstream.cli.train import train
from slipstream.errors import SlipstreamError

_STEP = "--trace resnet50 --cluster examples/clusters/10gbe.json"

app = typer.Typer(
    name="slipstream",
    help="Data-parallel PyTorch training that scales over slow networks.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help: boxes would double the time that --help takes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: slipstream train digits",
)
app.command(epilog="Example: slipstream train fashion --set train.epochs=3")(train)
app.command(epilog="Example: slipstream export runs/mine --output weights.safetensors")(export)
app.command(epilog="Example: slipstream report runs/mine")(report)
app.command(epilog="Example: slipstream probe --nodes 2 --per-node 2 --output cluster.json")(probe)
app.command(epilog="Example: slipstream profile fashion --output trace.json")(profile)
app.command(epilog=f"Example: slipstream plan {_STEP}")(plan)
app.command(epilog=f"Example: slipstream simulate {_STEP} --nodes 4,16,64")(simulate)
app.command(
    epilog="Example: slipstream lab --nodes 4 --rate 1gbit -- slipstream train digits",
    # Options behind the first word of the command are the command's, with or without "--".
    context_settings={"allow_interspersed_args": False},
)(lab)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that stand before a command."""


def main() -> None:
    """Run the command line; a user's mistake ends it with one sentence and exit code 1 or 2."""
    open_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        end_by_refusal(error)
    except KeyboardInterrupt:
        print("slipstream: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
