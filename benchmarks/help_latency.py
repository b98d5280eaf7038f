"""How long `slipstream --help` takes, against starting the same Python to do nothing.

Both run in turns, as a user's shell would run them; the median of all turns counts. The first
turn, which fills the file cache, is left out.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import Figure, at_most, finish, options


def seconds_of(command: list[str]) -> float:
    """Wall-clock time of one run. Raises CalledProcessError when the command fails."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Runs the turns and prints the figures."""
    quick: bool = options(__doc__).parse_args().quick
    slipstream = str(Path(sys.executable).parent / "slipstream")
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "slipstream --help": [slipstream, "--help"],
        "slipstream train --help": [slipstream, "train", "--help"],
    }
    num_turns = 5 if quick else 30
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(num_turns + 1):
        for name, command in commands.items():
            elapsed = seconds_of(command)
            if turn > 0:
                seconds[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    bare, top, train = medians.values()
    figures = [
        at_most(f"slipstream --help, median of {num_turns}", top, 0.4, " s"),
        Figure("slipstream --help, slowest", f"{max(seconds['slipstream --help']):.3f} s"),
        Figure("slipstream train --help, median", f"{train:.3f} s"),
        Figure("python -c pass, median", f"{bare:.3f} s"),
    ]
    ratios = {"help_over_bare_python": top / bare, "train_help_over_bare_python": train / bare}
    finish("help_latency", figures, ratios, quick=quick, seconds=medians)


if __name__ == "__main__":
    main()
