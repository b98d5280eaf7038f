"""What `make train` gives: the `fashion` recipe with 4 ranks (2 logical nodes x 2) on this machine.

Runs the command line as a user would, with --json, and reads accuracy, training time and images/s
from its summary. Peak memory is measured from outside: the largest sum, over all processes of the
run, of the memory that is theirs (shared pages shared out), looked at once a second. Compared
with the goals of at least 90 % accuracy on the whole test set in at most 5 minutes of training;
there is no other program to compare with, so the ratios are to those goals. --quick runs the
`digits` recipe instead, without goals.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

from harness import Figure, at_least, at_most, finish, options

GOAL_ACCURACY = 0.9
GOAL_SECONDS = 300.0


def memory_of_tree(root: psutil.Process) -> int:
    """Bytes of memory that a process and its descendants hold, shared pages shared out."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended between the listing and the look
    return total


def run_training(recipe: str, run_folder: Path) -> tuple[dict[str, Any], int]:
    """Trains, and returns the summary and the peak memory of all processes together, in bytes.

    Raises CalledProcessError when the training fails; its own error is on stderr by then.
    """
    slipstream = str(Path(sys.executable).parent / "slipstream")
    command = [slipstream, "train", recipe, "--nodes", "2", "--per-node", "2", "--json"]
    command += ["--run-folder", str(run_folder)]
    ended = threading.Event()
    peaks = [0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        root = psutil.Process(process.pid)

        def watch() -> None:
            while not ended.wait(1.0) and root.is_running():
                peaks[0] = max(peaks[0], memory_of_tree(root))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            output, _ = process.communicate()
        finally:
            ended.set()
            watcher.join()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    summary: dict[str, Any] = json.loads(output)
    return summary, peaks[0]


def main() -> None:
    """Trains once and prints the figures."""
    quick: bool = options(__doc__).parse_args().quick
    recipe = "digits" if quick else "fashion"
    with tempfile.TemporaryDirectory(prefix="slipstream-benchmark-") as folder:
        summary, peak_bytes = run_training(recipe, Path(folder) / "run")
    accuracy, seconds = summary["test_accuracy"], summary["train_seconds"]
    if quick:
        figures = [
            Figure("test accuracy (digits)", f"{accuracy:.4f}"),
            Figure("training time (digits)", f"{seconds:.1f} s"),
        ]
        ratios = {}
    else:
        figures = [
            at_least("test accuracy, whole test set", accuracy, GOAL_ACCURACY, digits=4),
            at_most("training time", seconds, GOAL_SECONDS, " s", digits=1),
        ]
        ratios = {
            "accuracy_over_goal": accuracy / GOAL_ACCURACY,
            "seconds_over_goal": seconds / GOAL_SECONDS,
        }
    exposed = summary["exposed_communication_seconds"]
    figures += [
        Figure("epochs, steps", f"{summary['epochs']}, {summary['steps']}"),
        Figure("images/s, all ranks", f"{summary['images_per_second']:.0f}"),
        Figure("communication exposed, whole training", f"{exposed:.1f} s"),
        Figure("peak memory, all processes", f"{peak_bytes / 2**30:.2f} GiB"),
        Figure("peak memory, largest rank", f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB"),
    ]
    finish("train_fashion", figures, ratios, quick=quick, recipe=recipe)


if __name__ == "__main__":
    main()
