"""Reading a run folder for its report: everything that is there, and a sentence for what is not."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import PlanError, RunFolderError
from slipstream.plan import Plan, PlanHistory
from slipstream.report.records import Record, of_kind, scan_metrics

_CHECKPOINT_NAME = re.compile(r"step-(\d{1,18})(?:-r\d{1,9})?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder: its name, its step, the bytes of its files."""

    name: str
    step: int
    bytes: int


@dataclass(frozen=True)
class Run:
    """What is known of a run. Absent parts are None or empty; `notices` says why, for people."""

    name: str
    recipe: dict[str, Any] | None = None
    recipe_text: str | None = None
    plan: Plan | None = None
    plans: PlanHistory | None = None
    environment: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    records: list[Record] = field(default_factory=list)
    checkpoints: tuple[Checkpoint, ...] = ()
    notices: tuple[str, ...] = ()

    def of(self, kind: str) -> list[Record]:
        """The metrics records of one kind."""
        return of_kind(self.records, kind)


def load_run(folder: Path) -> Run:
    """Reads `folder`; missing or damaged files end up in `notices`.

    Raises RunFolderError when there is no such folder, or nothing of a run in it, or when this user
    may not look.
    """
    try:
        return _load(folder)
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be read ({error.strerror or error}); name the folder that training "
            "printed, or let this user read and search it."
        ) from error


def _load(folder: Path) -> Run:
    """As `load_run`; raises OSError as well, where the system does not let it look."""
    if not folder.is_dir():
        raise RunFolderError(
            f"{folder} is no run folder: it does not exist; name the folder that training printed."
        )
    reader = _Reader(folder)
    recipe_text = reader.text("recipe.toml", "the recipe is not shown")
    run = Run(
        name=folder.resolve().name,
        recipe=reader.parse_recipe(recipe_text),
        recipe_text=recipe_text,
        plan=reader.plan(),
        plans=reader.plans(),
        environment=reader.object("environment.json", "the environment is not shown"),
        summary=reader.object("summary.json", "the run has not finished, or was stopped early"),
        records=reader.records(),
        checkpoints=reader.checkpoints(),
        notices=tuple(reader.notices),
    )
    if not (run.recipe_text or run.plan or run.summary or run.records or run.checkpoints):
        raise RunFolderError(
            f"{folder} holds nothing of a run (no recipe.toml, metrics.jsonl or summary.json); "
            "name the folder that training printed."
        )
    return run


class _Reader:
    """Reads files of one folder and collects a notice for each that is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notices: list[str] = []

    def text(self, name: str, consequence: str) -> str | None:
        path = self.folder / name
        if not path.is_file():
            self.notices.append(f"There is no {name}: {consequence}.")
            return None
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.notices.append(f"{name} cannot be read ({error}): {consequence}.")
            return None

    def object(self, name: str, consequence: str) -> dict[str, Any] | None:
        content = self.text(name, consequence)
        if content is None:
            return None
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            self.notices.append(f"{name} is damaged ({error}): {consequence}.")
            return None
        if not isinstance(value, dict):
            self.notices.append(f"{name} holds no JSON object: {consequence}.")
            return None
        return value

    def parse_recipe(self, content: str | None) -> dict[str, Any] | None:
        if content is None:
            return None
        try:
            return tomllib.loads(content)
        except (ValueError, RecursionError) as error:
            self.notices.append(f"recipe.toml is damaged ({error}); it is shown as it stands.")
            return None

    def plan(self) -> Plan | None:
        content = self.text("plan.json", "the buckets are not shown")
        if content is None:
            return None
        try:
            return Plan.from_json(content, "plan.json")
        except PlanError as error:
            self.notices.append(f"The buckets are not shown: {error}")
            return None

    def plans(self) -> PlanHistory | None:
        if not (self.folder / "plans.json").is_file():
            return None  # of a run that had one plan, from an earlier version
        content = self.text("plans.json", "it is not shown when plans changed")
        try:
            return None if content is None else PlanHistory.from_json(content, "plans.json")
        except PlanError as error:
            self.notices.append(f"It is not shown when plans changed: {error}")
            return None

    def records(self) -> list[Record]:
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            self.notices.append("There is no metrics.jsonl: there are no curves and no timeline.")
            return []
        try:
            records, damaged = scan_metrics(path)
        except RunFolderError as error:
            self.notices.append(str(error))
            return []
        if damaged:
            lines = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
            self.notices.append(f"metrics.jsonl: damaged lines are left out: {lines}.")
        return records

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        try:
            return _checkpoints(self.folder / "checkpoints")
        except OSError as error:
            why = error.strerror or error
            self.notices.append(f"checkpoints cannot be read ({why}): none are listed.")
            return ()


def _checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    if not folder.is_dir():
        return ()
    found = []
    for path in folder.iterdir():
        match = _CHECKPOINT_NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            num_bytes = sum(p.lstat().st_size for p in path.rglob("*") if p.is_file())
            found.append(Checkpoint(path.name, int(match[1]), num_bytes))
    return tuple(sorted(found, key=lambda checkpoint: checkpoint.step))
