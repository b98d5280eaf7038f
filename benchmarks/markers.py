"""Documents with generated parts: what stands between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


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


def stale_parts(page: Path, parts: Mapping[str, str], *, write: bool) -> list[str]:
    """The generated parts of a page that differ from what stands there; writes them if asked."""
    before = page.read_text(encoding="utf-8")
    stale = [name for name, text in parts.items() if renewed(before, name, text) != before]
    if write:
        after = before
        for name, text in parts.items():
            after = renewed(after, name, text)
        page.write_text(after, encoding="utf-8")
    return stale


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; every row has as many cells as the head."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
