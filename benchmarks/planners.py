"""How long planning takes, and how much later MG-WFBP's rule ends than the optimum.

Whole plans are timed (`plan_step` with its default tolerance: the exact optimum, the fewest buckets
within 0.5 % of it, lower bounds, the predicted step), for random models of log-normal tensor sizes,
on networks where communication takes a fifth of the backward, as long as it, and five times as
long. The median of the repetitions counts, and of the three networks the slowest.

* 100,000 tensors, costs on one line; and the optimum's time per tensor at 100,000 against 10,000,
  which stays the same if it is linear.
* 1,000 tensors, costs in a table of 37 points as `slipstream probe` measures them (flat, then a
  rate, 5 % noise, so that it sometimes falls), the least of two such tables, and of three lines.
* The published family in which the greedy rule is worst (startup 1, every gap and tensor 0.9).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from harness import Figure, at_least, at_most, finish, options
from slipstream.cluster import Cluster
from slipstream.costs import Costs, Curve, Line, Minimum, Table
from slipstream.plan import plan_step
from slipstream.plan.lane import Lane
from slipstream.plan.mgwfbp import mgwfbp
from slipstream.plan.optimal import optimal
from slipstream.trace import Trace, TraceGradient

LOADS = (0.2, 1.0, 5.0)
RATE = 8e-10
LINE = Line(5e-4, RATE)


def model(num_tensors: int, load: float) -> Trace:
    """A model for which sending everything at RATE takes `load` times the backward."""
    rng = np.random.default_rng(num_tensors)
    numels = np.exp(rng.normal(9, 2.5, num_tensors)).astype(int)
    backward = float(numels.sum()) * 4 * RATE / load
    ready = np.cumsum(rng.exponential(1.0, num_tensors))
    ready *= backward / ready[-1]
    return Trace(
        model="random",
        batch_size=1,
        input_seconds=0.0,
        forward_seconds=backward / 2,
        update_seconds=0.0,
        gradients=tuple(
            TraceGradient(name=f"g{index}", numel=numel, ready_seconds=at)
            for index, (numel, at) in enumerate(zip(numels.tolist(), ready.tolist(), strict=True))
        ),
    )


def probed(startup_seconds: float, seconds_per_byte: float) -> Table:
    """A table as measured: 1 KiB to 256 MiB, flat and then a rate, with noise."""
    rng = np.random.default_rng(5)
    sizes = np.geomspace(1024, 2**28, 37)
    times = np.maximum(startup_seconds, seconds_per_byte * sizes) * rng.uniform(0.95, 1.05, 37)
    return Table(tuple(zip(sizes.tolist(), times.tolist(), strict=True)))


def seconds_of(work: Callable[[], object], repetitions: int) -> float:
    """The median time of `work`."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def planning_seconds(num_tensors: int, curves: dict[str, Curve], repetitions: int) -> float:
    """Planning a step with these collectives, on the network on which that takes longest."""
    costs = Costs.from_curves(Cluster.regular(4, 1), curves)
    found = []
    for load in LOADS:
        trace = model(num_tensors, load)

        def plan(trace: Trace = trace) -> object:
            return plan_step("optimal", trace, costs, collectives=tuple(curves))

        found.append(seconds_of(plan, repetitions))
    return max(found)


def per_tensor_seconds(num_tensors: int, curve: Curve, repetitions: int) -> float:
    """The exact optimum alone, per tensor, where communication is as long as the backward."""
    trace = model(num_tensors, 1.0)
    ready = [gradient.ready_seconds for gradient in trace.gradients]
    sizes = [gradient.bytes for gradient in trace.gradients]

    def solve() -> object:
        return optimal(Lane(ready, sizes, curve))

    return seconds_of(solve, repetitions) / num_tensors


def greedy_over_optimum(num_tensors: int) -> float:
    """End of the paper's plan over the optimum's, in the family in which the rule is worst."""
    line = Line(1.0, 0.1)
    lane = Lane([0.9 * (j + 1) for j in range(num_tensors)], [9] * num_tensors, line)
    greedy = mgwfbp(lane.ready_seconds, lane.sums, line, line.startup_seconds)
    return lane.end_seconds(greedy) / optimal(lane).end_seconds


def main() -> None:
    """Times the planners and prints the figures."""
    quick: bool = options(__doc__).parse_args().quick
    repetitions = 3 if quick else 9
    table, other = probed(7e-3, 12e-9), probed(2e-3, 20e-9)
    three = (LINE, Line(1e-4, 3 * RATE), Line(3e-3, RATE / 2))
    by_line = planning_seconds(100_000, {"native": LINE}, repetitions)
    by_table = planning_seconds(1000, {"native": table}, repetitions)
    by_tables = planning_seconds(1000, {"native": table, "torus": other}, repetitions)
    names = ("native", "torus", "direct")
    by_lines = planning_seconds(1000, dict(zip(names, three, strict=True)), repetitions)
    growth = {
        name: per_tensor_seconds(100_000, curve, repetitions)
        / per_tensor_seconds(10_000, curve, repetitions)
        for name, curve in (("line", LINE), ("lines", Minimum(three)))
    }
    worst = greedy_over_optimum(1000)
    figures = [
        at_most("plan of 100,000 tensors, a line", by_line, 1.0, " s"),
        at_most("plan of 1,000 tensors, a table", by_table, 0.2, " s"),
        Figure("plan of 1,000 tensors, the least of two tables", f"{by_tables:.3f} s"),
        Figure("plan of 1,000 tensors, the least of three lines", f"{by_lines:.3f} s"),
        at_most("optimum per tensor, 100,000 / 10,000, a line", growth["line"], 2.0),
        at_most("optimum per tensor, 100,000 / 10,000, three lines", growth["lines"], 2.0),
        at_least("MG-WFBP / optimum, worst published family", worst, 1.9),
    ]
    ratios = {
        "per_tensor_growth_line": growth["line"],
        "per_tensor_growth_three_lines": growth["lines"],
        "mgwfbp_over_optimum": worst,
    }
    finish("planners", figures, ratios, quick=quick)


if __name__ == "__main__":
    main()
