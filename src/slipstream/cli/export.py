"""``slipstream export``: a checkpoint's weights as one plain safetensors file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import OverwriteOption
from slipstream.cli.output import print_document


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run: its newest one.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
    overwrite: OverwriteOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write plain weights as safetensors.

    model.load_state_dict(safetensors.torch.load_file(FILE)) takes it as it is.
    """
    from slipstream.outputs import check_output
    from slipstream.train.checkpoint import export_weights, find_checkpoint

    found = find_checkpoint(checkpoint)
    check_output(output, "--output", overwrite=overwrite)
    path = export_weights(found, output, overwrite=overwrite)
    if as_json:
        print_document({"checkpoint": str(found), "output": str(path)}, sys.stdout)
    else:
        print(f"weights of {found} written to {path}")
