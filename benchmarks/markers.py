"""Documents with generated parts: what stands between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import re


def renewed(document: str, name: str, content: str) -> str:
    """The document with the text between the markers of that name replaced.

    Raises ValueError unless the pair of markers is there once.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    inner = f"{content}\n" if content else ""
    text, count = pattern.subn(lambda found: f"{found[1]}{inner}{found[2]}", document)
    if count != 1:
        raise ValueError(f"there are {count} pairs of markers for {name}; one is right.")
    return text


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; every row has as many cells as the head."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
