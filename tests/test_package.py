"""The package as a whole: its public names, what importing it loads, its files and its pins."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import slipstream
from slipstream.cli.main import app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "slipstream"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHON_FILES = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
HEAVY = ["matplotlib", "numpy", "pydantic", "scipy", "sklearn", "torch", "torchvision"]

SURFACE = {
    "train": [
        "recipe",
        "--set",
        "--nodes",
        "--per-node",
        "--run-folder",
        "--resume",
        "--json",
    ],
    "export": ["checkpoint", "--output", "--overwrite", "--json"],
    "report": ["run", "--json"],
    "plan": [
        "--trace",
        "--cluster",
        "--planner",
        "--nodes",
        "--tolerance",
        "--max-bucket-bytes",
        "--collective",
        "--wire",
        "--density",
        "--sparse",
        "--values",
        "--selector",
        "--dense",
        "--output",
        "--overwrite",
        "--json",
    ],
    "simulate": [
        "--trace",
        "--cluster",
        "--nodes",
        "--planner",
        "--plan",
        "--tolerance",
        "--collective",
        "--wire",
        "--density",
        "--sparse",
        "--values",
        "--selector",
        "--dense",
        "--jitter",
        "--stragglers",
        "--network-jitter",
        "--steps",
        "--seed",
        "--plot",
        "--timeline",
        "--overwrite",
        "--json",
    ],
    "lab": [
        "command",
        "--nodes",
        "--rate",
        "--per-node",
        "--intra-rate",
        "--cut",
        "--after",
        "--torchrun",
        "--logs",
        "--overwrite",
        "--timeout",
        "--grace",
        "--check",
        "--json",
    ],
    "probe": [
        "--nodes",
        "--per-node",
        "--seconds",
        "--collective",
        "--wire",
        "--density",
        "--sparse",
        "--values",
        "--selector",
        "--output",
        "--overwrite",
        "--json",
    ],
    "profile": [
        "recipe",
        "--set",
        "--nodes",
        "--per-node",
        "--steps",
        "--output",
        "--overwrite",
        "--json",
    ],
}
"""Every command with its arguments and options, in order."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def modules_loaded_by(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after running the code."""
    report = f"import sys; print('LOADED', *(m for m in {HEAVY!r} if m in sys.modules))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.strip().splitlines()[-1].split()[1:])


def pure_modules() -> list[str]:
    """Modules that must do without torch: the pure half, and the command line's own."""
    files = [SOURCE / f"{name}.py" for name in ("cluster", "documents", "errors", "trace", "words")]
    files += [SOURCE / "optim" / "schedules.py"]
    files += [SOURCE / "train" / "recipe.py"]
    for package in ("cli", "costs", "lab", "plan", "report", "simulate"):
        files += sorted((SOURCE / package).rglob("*.py"))
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in files]
    return [name.removesuffix(".__init__") for name in names]


def test_public_names_are_sorted_and_lead_somewhere() -> None:
    assert slipstream.__all__ == sorted(slipstream.__all__)
    for name in slipstream.__all__:
        assert getattr(slipstream, name).__name__ == name
        assert name in dir(slipstream)
    with pytest.raises(AttributeError, match="no attribute 'GradientSink'"):
        _ = slipstream.GradientSink


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("__init__.py")), ids=relative)
def test_every_name_that_a_package_imports_for_its_users_is_exported(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream")
        for alias in node.names
    }
    exported = {
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }
    assert {name for name in imported if not name.startswith("_")} == exported


def test_version_stands_in_the_package_as_in_its_metadata() -> None:
    assert slipstream.__version__ == PYPROJECT["project"]["version"]


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert modules_loaded_by("import slipstream; slipstream.SlipstreamError") == set()


def test_pure_half_and_command_line_do_without_torch() -> None:
    names = pure_modules()
    assert {"slipstream.plan.model", "slipstream.cli.main", "slipstream.report"} <= set(names)
    assert modules_loaded_by("\n".join(f"import {name}" for name in names)) <= {"numpy", "pydantic"}


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--help"], set()),
        (["train", "--help"], {"pydantic"}),  # typer reads a command's arguments with it
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str], allowed: set[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['slipstream', *{arguments!r}]\n"
        "from slipstream.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
    )
    assert modules_loaded_by(code) <= allowed


def test_commands_and_their_options_are_those_we_mean_to_keep() -> None:
    command = typer.main.get_command(app)
    surface = {
        name: [parameter.opts[0] for parameter in sub.params]
        for name, sub in command.commands.items()  # type: ignore[attr-defined]
    }
    assert surface == SURFACE


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{node.name} at line {node.lineno} has {length} lines"


def test_everything_that_is_installed_or_builds_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    pins = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}
    groups = PYPROJECT["dependency-groups"]
    wanted = PYPROJECT["project"]["dependencies"] + PYPROJECT["build-system"]["requires"]
    for text in [*wanted, *groups["test"], *groups["dev"], "pip", "editables"]:
        requirement = Requirement(text)
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{text} against the pin {pin}"


def test_readme_names_the_two_commands_on_its_first_screen() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "make train" in first_screen
    assert "make test" in first_screen
