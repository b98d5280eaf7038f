"""Building HTML and SVG from values, where every text is escaped unless it is `Markup` already.

The result is well-formed XML as well as HTML, which tests check with an XML parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

# What XML 1.0 forbids: control characters, surrogates, the two non-characters.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_VOID = frozenset({"meta", "link", "br", "hr", "img", "rect", "line", "circle", "path", "stop"})

Attribute = str | int | float | None
Child = object


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def el(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """One element. None among children or attributes is left out, lists are flattened.

    Attribute names lose a trailing underscore (`class_`) and other underscores become hyphens.
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID and not children:
        return Markup(f"<{tag}{named}/>")
    return Markup(f"<{tag}{named}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Children one after the other, escaped where they are not markup."""
    return Markup("".join(_child(child) for child in children))


def text(value: object) -> Markup:
    """`value` as escaped text; characters that XML forbids become replacement characters."""
    return Markup(escape(_FORBIDDEN.sub("\ufffd", str(value)), quote=True))


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, list | tuple):
        return join(child)
    return text(child)


def _attribute(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return text(value)
