"""The page as text: self-contained, well-formed, escaped, and complete for incomplete runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sample_run import plan, records, summary, write_run
from slipstream.errors import RunFolderError
from slipstream.plan import Bucket, Plan
from slipstream.report import build_report
from slipstream.report.build import render
from slipstream.report.records import format_line
from slipstream.report.run import Run

_LOADING = {"src", "srcset", "href", "xlink:href", "data", "poster", "action", "formaction"}


class _Found(HTMLParser):
    """Tags, references and handlers as an HTML parser, not an XML one, sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in _LOADING]
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]


def check_page(page: str) -> ElementTree.Element:
    """Asserts that `page` is well-formed and refers to nothing outside; returns its root."""
    found = _Found(page)
    assert found.tags.isdisjoint({"script", "iframe", "object", "embed", "form", "base", "img"})
    assert found.handlers == []
    assert all(reference.startswith(("#", "data:")) for reference in found.references)
    styles = "".join(re.findall(r"<style>(.*?)</style>", page, re.S))
    assert "@import" not in styles
    assert re.findall(r"url\((?!#)", styles) == []
    doctype, document = page.split("\n", 1)
    assert doctype == "<!DOCTYPE html>"
    return ElementTree.fromstring(document)


def words(root: ElementTree.Element) -> str:
    """All text that a reader sees."""
    body = root.find("body")
    assert body is not None
    return " ".join("".join(body.itertext()).split())


def test_a_finished_run_shows_everything(tmp_path: Path) -> None:
    path = build_report(write_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.html"
    root = check_page(path.read_text())
    shown = words(root)
    for expected in (
        "92.43 %",
        "4 min 31 s",
        "1,322",
        "117 ms of 139 ms of communication (84 %) ran hidden; for 22.0 ms the step waited.",
        "Planner ddp: 5 buckets, 4.18 MiB",
        "layer1.12.weight",
        "21optimal562.5 ms65.5 msauto <changed> it",
        "Step 300 was skipped: gradient of stem.weight not finite on ranks 1, 3.",
        "Resumed after step 234.",
        "global_batch_size512",
        "CPython 3.11.2",
        "step-00000117461 KiB",
    ):
        assert expected in shown
    assert root.find(".//ul[@class='notices']") is None
    assert len(root.findall(".//svg[@class='chart']")) == 8
    assert path.stat().st_size < 600_000


def test_the_policy_allows_this_style_sheet_and_nothing_else(tmp_path: Path) -> None:
    root = check_page(build_report(write_run(tmp_path / "run")).read_text())
    policies = root.findall("head/meta[@http-equiv='Content-Security-Policy']")
    assert len(policies) == 1
    assert policies[0].get("content", "").startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policies[0].get("content", "")


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    first = build_report(folder).read_bytes()
    assert build_report(folder).read_bytes() == first
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("recipe.toml", "There is no recipe.toml: the recipe is not shown."),
        ("plan.json", "There is no plan.json: the buckets are not shown."),
        ("environment.json", "There is no environment.json: the environment is not shown."),
        ("metrics.jsonl", "There is no metrics.jsonl: there are no curves and no timeline."),
        ("summary.json", "There is no summary.json: the run has not finished"),
    ],
)
def test_a_missing_file_is_said_and_the_rest_is_shown(
    tmp_path: Path, missing: str, said: str
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / missing).unlink()
    shown = words(check_page(build_report(folder).read_text()))
    assert said in shown
    assert "Curves" in shown


@pytest.mark.parametrize("name", ["recipe.toml", "plan.json", "environment.json", "summary.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_named_and_the_rest_is_shown(
    tmp_path: Path, name: str, content: bytes
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_bytes(content)
    root = check_page(build_report(folder).read_text())
    notices = root.findall(".//ul[@class='notices']/li")
    is_empty_toml = name == "recipe.toml" and content in (b"", b"[1]")
    assert is_empty_toml or any(name in "".join(notice.itertext()) for notice in notices)
    assert len(root.findall(".//svg[@class='chart']")) == 8


def test_damaged_lines_of_metrics_are_counted_and_a_torn_end_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=50)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[3] = "nonsense\n"
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"kind":"st')
    shown = words(check_page(build_report(folder).read_text()))
    assert "metrics.jsonl: damaged lines are left out: 4." in shown


def test_a_run_stopped_before_its_first_evaluation(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=40)
    (folder / "summary.json").unlink()
    shown = words(check_page(build_report(folder).read_text()))
    assert "not finished" in shown
    assert "no evaluation yet" in shown
    assert "40 steps done" in shown
    assert "No epoch was finished and evaluated yet." in shown


def test_a_run_that_has_only_a_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml").write_text('name = "digits"\n')
    shown = words(check_page(build_report(folder).read_text()))
    assert "Nothing was recorded." in shown
    assert "No step's timeline was recorded." in shown


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_what_is_no_run_folder_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "nothing"
    if kind == "empty":
        folder.mkdir()
    elif kind == "file":
        folder.write_text("")
    with pytest.raises(RunFolderError, match="nothing"):
        build_report(folder)
    assert not (folder / "report.html").exists()


def test_a_folder_that_cannot_take_the_report_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    (folder / "report.html").mkdir()
    with pytest.raises(RunFolderError, match=r"report\.html cannot be written"):
        build_report(folder)
    assert not list(folder.glob(".partial-*"))


_HOSTILE = st.one_of(
    st.text(),
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            '"><img src=x onerror=alert(1)>',
            "' onmouseover='x",
            "]]></style><base href=//x>",
            "&#0;&nbsp;&bogus;",
            "\x00\x1b[31m\ud800\ufffe",
        ]
    ),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_HOSTILE, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(text=_HOSTILE, value=_JSON, tables=st.dictionaries(_HOSTILE, _JSON, max_size=4))
def test_text_from_a_run_never_becomes_markup(
    text: str, value: object, tables: dict[str, object]
) -> None:
    spans = [{"row": "communication", "name": text, "start_seconds": 0, "end_seconds": 1}, value]
    run = Run(
        name=text,
        recipe=tables,
        recipe_text=text,
        plan=None,
        environment={"packages": value, text: value},
        summary={"recipe": value, "test_accuracy": value, "train_seconds": value, text: value},
        records=[
            {"kind": "step", "step": 1, "loss": value, "accuracy": value},
            {"kind": "evaluation", "step": 1, "epoch": value, "test_loss": value},
            {"kind": "epoch", "step": 1, "epoch": value, "seconds": value},
            {"kind": "skip", "step": 1, "ranks": value, "parameter": text},
            {"kind": "timeline", "step": 1, "spans": spans},
        ],
        notices=(text,),
    )
    check_page(render(run).encode().decode())


def test_hostile_gradient_names_stay_text(tmp_path: Path) -> None:
    name = '<img src="http://x.invalid/">'
    hostile = Plan(planner=name, reduce=(Bucket(gradients=(name, "b"), bytes=2**64),))
    shown = words(check_page(render(Run(name="run", plan=hostile))))
    assert shown.count(name) >= 2
    assert "1 bucket, 16777216 TiB" in shown


def test_extreme_numbers_are_drawn_within_the_chart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    values = [float("nan"), 1e308, -1e308, 0.0, 5e-324, 1e30, float("inf"), 2.0]
    lines = [
        format_line({"kind": "step", "step": 2**50 + i, "loss": value, "images_per_second": -value})
        for i, value in enumerate(values)
    ]
    (folder / "metrics.jsonl").write_text("".join(lines))
    page = build_report(folder).read_text()
    root = check_page(page)
    assert "NaN" not in page
    for path in root.findall(".//svg[@class='chart']//path"):
        places = [float(place) for place in re.findall(r"[-\d.]+", path.get("d", ""))]
        assert all(0 <= place <= 560 for place in places)


def test_long_runs_give_pages_of_bounded_size(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    short = build_report(folder).stat().st_size
    extra = [{**record, "step": record["step"] + 10_000} for record in records(700)] * 20
    skips = [{"kind": "skip", "step": 5, "ranks": [0], "parameter": "p"}] * 5_000
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(map(format_line, extra + skips))
    assert build_report(folder).stat().st_size < 2 * short


def test_building_a_report_loads_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    code = (
        "import sys; from pathlib import Path; from slipstream.report import *; "
        "environment(); build_report(Path(sys.argv[1])); "
        "assert not {'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def test_the_summary_wins_over_the_records(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    facts = summary(folder) | {
        "hidden_communication_seconds": 9.0,
        "exposed_communication_seconds": 1.0,
    }
    (folder / "summary.json").write_text(json.dumps(facts))
    shown = words(check_page(build_report(folder).read_text()))
    assert "90 %in all: 9.00 s hidden, 1.00 s exposed" in shown
    assert plan().planner in shown
