"""Tables and notes of the commands that predict: aligned text for people."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> str:
    """Columns two spaces apart, flush right but for those whose head is in `left`."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def aligned(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if title in left else cell.rjust(width)
            for title, cell, width in zip(head, line, widths, strict=True)
        )
        return "  ".join(cells).rstrip()

    return "\n".join(aligned(line) for line in lines)


def warn(notes: Iterable[str]) -> None:
    """Each note on a line of standard error."""
    for note in notes:
        print(f"slipstream: note: {note}", file=sys.stderr)
