"""Runs every benchmark and renews the tables of docs/benchmarks.md (`make bench`).

Each table stands between `<!-- NAME -->` and `<!-- /NAME -->`, NAME being the script's; what
surrounds the markers is kept. The file is written after each benchmark that ran to its end, so a
failure loses nothing. With --quick every benchmark runs quickly and the file is left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from markers import markdown_table, renewed

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
SCRIPTS = (
    "engine_vs_ddp",
    "train_fashion",
    "help_latency",
    "planners",
    "simulate_speed",
    "lab_plans",
    "lab_collectives",
    "lab_joint",
    "selection",
    "lab_sparse",
    "reproduce_mgwfbp",
    "reproduce_four_minutes",
    "reproduce_public_cloud",
    "operators",
)


def machine() -> str:
    """The machine in generic words: cores, vector instructions, memory, system, versions."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    widest = next((flag for flag in ("avx512f", "avx2", "asimd") if f" {flag}" in flags), "none")
    memory = round(psutil.virtual_memory().total / 2**30)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores ({platform.machine()}, {widest}), {memory} GiB, no GPU used; "
        f"{platform.system()}, Python {platform.python_version()}, torch {version('torch')}"
    )


def run(script: str, quick: bool) -> dict[str, Any]:
    """Runs one benchmark, its output shown as it comes, and returns the object of its last line.

    Raises RuntimeError when it fails or ends without such a line.
    """
    command = [sys.executable, str(HERE / f"{script}.py"), *(["--quick"] if quick else [])]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if last:
                print(f"  {last}", flush=True)
            last = line.strip()
    if process.returncode != 0:
        raise RuntimeError(f"benchmarks/{script}.py ended with exit code {process.returncode}.")
    try:
        result: dict[str, Any] = json.loads(last)
    except json.JSONDecodeError as error:
        raise RuntimeError(f"benchmarks/{script}.py did not end with a JSON object.") from error
    return result


def table(script: str, result: dict[str, Any]) -> str:
    """The Markdown of one result: command, date, machine, figures, and tables of its own."""
    met = {True: "yes", False: "**no**", None: ""}
    rows = [[f["what"], f["value"], f["goal"], met[f["met"]]] for f in result["figures"]]
    source = f"`python benchmarks/{script}.py`, {date.today().isoformat()}; {machine()}."
    figures = markdown_table(["what", "measured", "goal", "met"], rows)
    return "\n\n".join([source, figures, *result.get("tables", [])])


def main() -> int:
    """Runs the benchmarks; returns 0 when all ran to their end, whatever they measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a look: the document is left alone")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    arguments = parser.parse_args()
    failures = []
    for script in arguments.only:
        print(f"{script} ...", flush=True)
        try:
            result = run(script, arguments.quick)
        except RuntimeError as error:
            failures.append(str(error))
            print(f"  {error}", file=sys.stderr, flush=True)
            continue
        if not arguments.quick:
            document = DOCUMENT.read_text(encoding="utf-8")
            DOCUMENT.write_text(renewed(document, script, table(script, result)), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
