"""From a run folder to `report.html`."""

from __future__ import annotations

import base64
import hashlib
import os
from contextlib import suppress
from importlib import resources
from pathlib import Path

from slipstream.errors import RunFolderError
from slipstream.report import sections
from slipstream.report.curves import key, main_curves, more_curves
from slipstream.report.headline import headline
from slipstream.report.markup import Markup, el
from slipstream.report.run import Run, load_run

_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http:%2F%2Fwww.w3.org%2F2000%2Fsvg' viewBox='0 0 24 24' "
    "fill='none' stroke='%230d9488' stroke-width='2.4' stroke-linecap='round'%3E"
    "%3Cpath d='M2 6C8 6 9 10 22 10M2 12H22M2 18C8 18 9 14 22 14'/%3E%3C/svg%3E"
)


def build_report(run_folder: Path) -> Path:
    """Writes `run_folder/report.html` from what the folder holds; returns its path.

    Needs no torch, no network and no other part of the run to be there; replaces an older report
    in one step; the same folder gives the same bytes. Raises RunFolderError when `run_folder` is
    no run folder or cannot be written.
    """
    path = run_folder / "report.html"
    content = render(load_run(run_folder))
    temporary = run_folder / ".partial-report.html"
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # there is none where nothing can be written
            temporary.unlink()
        raise RunFolderError(
            f"{path} cannot be written: {error.strerror or error}; "
            "copy the run folder to a place that can be written."
        ) from error
    return path


def render(run: Run) -> str:
    """The whole page, also well-formed XML after its first line."""
    style = resources.files("slipstream.report").joinpath("style.css").read_text(encoding="utf-8")
    return "<!DOCTYPE html>\n" + el("html", _head(run, style), _body(run), lang="en") + "\n"


def _head(run: Run, style: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # Nothing may be fetched or run: only this one style sheet and the icon in this file.
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{run.name} · Slipstream"),
        el("link", rel="icon", href=_ICON),
        el("style", Markup(style)),
    )


def _body(run: Run) -> Markup:
    timeline = sections.last_timeline(run)
    parts = (
        ("curves", "Curves", [key(run), main_curves(run)]),
        ("timeline", "A step's timeline", sections.step_timeline(timeline)),
        ("plan", "Buckets", [sections.plan_table(run, timeline), sections.plan_history(run)]),
        ("evaluations", "Epochs", [sections.events(run), sections.sparse_table(run)]),
        ("more", "More curves", more_curves(run)),
        ("recipe", "Recipe", sections.recipe(run)),
        ("environment", "Environment", sections.environment(run)),
        ("files", "Files", sections.files(run)),
    )
    links = [el("a", title, href=f"#{name}") for name, title, _ in parts]
    return el(
        "body",
        el(
            "main",
            headline(run),
            sections.notices(run),
            el("nav", links, aria_label="Sections"),
            [el("section", el("h2", title), part, id=name) for name, title, part in parts],
        ),
        el(
            "footer",
            "This page is complete in itself: no script, no network.",
        ),
    )
