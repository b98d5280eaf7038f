"""A real browser opens the report: no complaint, no request, both colour schemes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Browser, find_chromium, open_browser
from sample_run import write_run
from slipstream.report import build_report

_PROGRAM = find_chromium()

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(_PROGRAM is None, reason="Chromium is not installed"),
]

_BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert _PROGRAM is not None
    with open_browser(_PROGRAM, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def test_the_report_opens_without_complaint_or_request(browser: Browser, tmp_path: Path) -> None:
    page = build_report(write_run(tmp_path / "run"))
    visit = browser.visit(
        page,
        "document.querySelectorAll('svg.chart').length",
        "document.querySelectorAll('svg.gantt').length",
        "document.styleSheets[0].cssRules.length > 50",
        "document.documentElement.scrollWidth <= window.innerWidth",
        _BACKGROUND,
    )
    assert visit.complaints == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [page.as_uri()]
    assert visit.values[:4] == [8, 1, True, True]
    dark = browser.visit(page, _BACKGROUND, dark=True)
    assert dark.complaints == []
    assert dark.values[0] != visit.values[4]


def test_a_run_that_has_hardly_begun_opens_too(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml").write_text('name = "<script>console.error(1)</script>"\n')
    page = build_report(folder)
    visit = browser.visit(page, "document.querySelector('h1').textContent")
    assert visit.complaints == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [page.as_uri()]
    assert "<script>console.error(1)</script>" in visit.values[0]


def test_what_the_report_forbids_is_noticed_here(browser: Browser, tmp_path: Path) -> None:
    """The check itself: a picture from elsewhere is refused by the policy and seen by the test."""
    page = build_report(write_run(tmp_path / "run"))
    spoilt = tmp_path / "spoilt.html"
    picture = '<img src="http://elsewhere.invalid/a.png"/><script>console.log(1)</script>'
    spoilt.write_text(page.read_text().replace("<main>", f"<main>{picture}"))
    visit = browser.visit(spoilt)
    assert any("elsewhere.invalid" in text for text in visit.complaints)
    assert any("script" in text for text in visit.complaints)

    unguarded = tmp_path / "unguarded.html"
    unguarded.write_text(f"<!DOCTYPE html><title>x</title>{picture}")
    visit = browser.visit(unguarded)
    assert "http://elsewhere.invalid/a.png" in visit.requests
