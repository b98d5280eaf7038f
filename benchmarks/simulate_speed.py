"""How long a scaling study takes: 13 numbers of nodes, 1,000 tensors, five planners.

1, 2, 4 ... 4096 nodes on 10 Gbit/s links; a made-up step of 1,000 tensors with irregular sizes and
times; wfbp, single, ddp, mgwfbp and optimal, each planned and simulated. Once with costs by formula
(a line), once with a table of 19 points for every number of nodes. Imports are not counted.
Each study runs several times; the median counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from harness import Figure, at_most, finish, options
from slipstream.cluster import Cluster
from slipstream.costs import Costs, Link, Links, Table
from slipstream.simulate import DEFAULT_PLANNERS, PlannerChoice, simulate_scaling
from slipstream.trace import Trace, TraceGradient

NODES = [2**power for power in range(13)]
LINKS = Links(inter=Link(latency_seconds=30e-6, seconds_per_byte=0.8e-9))
PLANNERS = [PlannerChoice(name) for name in DEFAULT_PLANNERS]


def made_up_step(num_tensors: int) -> Trace:
    """Tensors 0.3 ms apart on average, of 4 B to 4 MiB, evenly over the logarithm of the size."""
    draws = np.random.default_rng(0)
    ready = np.cumsum(draws.exponential(3e-4, num_tensors)).tolist()
    numels = np.exp(draws.uniform(0, np.log(2**20), num_tensors)).astype(int).tolist()
    return Trace(
        model="made up",
        batch_size=1,
        input_seconds=0.0,
        forward_seconds=ready[-1] / 2,
        update_seconds=0.0,
        gradients=tuple(
            TraceGradient(name=f"p{index}", numel=numel, ready_seconds=seconds)
            for index, (numel, seconds) in enumerate(zip(numels, ready, strict=True))
        ),
    )


def by_formula(trace: Trace) -> None:
    """The study with a line for each number of nodes."""
    simulate_scaling(trace, Costs(Cluster.regular(1, 1), {}, LINKS), NODES, PLANNERS)


def by_table(trace: Trace) -> None:
    """The study with tables: the formula's line at 19 sizes, with a jump at 256 KiB."""
    for nodes in NODES:
        cluster = Cluster.regular(nodes, 1)
        line = Costs(cluster, {}, LINKS).curve()
        sizes = [1024.0 * 2**power for power in range(19)]
        points = tuple((m, line.seconds(m) * (1.5 if m > 2**18 else 1.0)) for m in sizes)
        costs = Costs.from_curves(cluster, {"native": Table(points)})
        simulate_scaling(trace, costs, [nodes], PLANNERS)


def seconds_of(study: Callable[[Trace], None], trace: Trace, num_turns: int) -> float:
    """The median wall-clock time of a study, the first turn left out."""
    found = []
    for _ in range(num_turns + 1):
        start = time.perf_counter()
        study(trace)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def main() -> None:
    """Runs the studies and prints the figures."""
    quick: bool = options(__doc__).parse_args().quick
    num_turns = 3 if quick else 15
    trace = made_up_step(1000)
    formula = seconds_of(by_formula, trace, num_turns)
    table = seconds_of(by_table, trace, num_turns)
    study = "13 numbers of nodes x 1,000 tensors x 5 planners"
    figures = [
        at_most(f"{study}, costs by formula", formula, 2, " s"),
        Figure(f"{study}, costs by table", f"{table:.3f} s"),
    ]
    ratios = {"table_over_formula": table / formula}
    finish("simulate_speed", figures, ratios, quick=quick, num_turns=num_turns)


if __name__ == "__main__":
    main()
