"""What "ImageNet in four minutes" gained, simulated: docs/reproduction/four-minutes.md.

1,024 ranks on 64 nodes of 16, the paper's best group size, with links and compute times that are
stated on the page. Ring without and with fusion, the hierarchical all-reduce, the 2D torus, the
paper's own rule (`four_minutes`) and the joint optimum, planned and simulated by the library on the
shipped traces. Nothing is timed, so the same code gives the same tables.

Without options the generated parts of the page are renewed; --check compares them instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from harness import Figure, finish, options
from markers import markdown_table, stale_parts
from slipstream.cluster import Cluster
from slipstream.costs import Costs, Link, Links
from slipstream.plan import plan_step
from slipstream.simulate import load_trace
from slipstream.trace import Trace, TraceGradient
from slipstream.wires import DENSE_WIRES, Wire

DOCUMENT = Path(__file__).parents[1] / "docs" / "reproduction" / "four-minutes.md"
GROUP = 16
LINKS = Links(
    intra=Link(latency_seconds=15e-6, seconds_per_byte=1 / 10e9, reduce_seconds_per_byte=0.0),
    inter=Link(latency_seconds=15e-6, seconds_per_byte=1 / 12.5e9, reduce_seconds_per_byte=0.0),
)
"""15 us a message; 10 GB/s between the cards of a node, 100 Gbit/s between nodes."""
IMAGES_PER_SECOND = {"resnet50": 142.0, "alexnet": 500.0}
"""Of one card; see the page."""
BATCH_SIZE = {"resnet50": 64, "alexnet": 64}
WIRE: Wire = "bfloat16"
FUSED = {"first_bytes": 16 * 2**20, "cap_bytes": 16 * 2**20}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring, a message a tensor": ("wfbp", {"collectives": ("ring",)}),
    "ring, fused": ("ddp", {"collectives": ("ring",), **FUSED}),
    "hierarchical, fused": ("ddp", {"collectives": ("hierarchical",), **FUSED}),
    "torus, fused": ("ddp", {"collectives": ("torus",), **FUSED}),
    "the paper's rule (four_minutes)": ("four_minutes", {}),
    "joint optimum": ("optimal", {"collectives": tuple(DENSE_WIRES)}),
}
RANKS = (64, 256, 1024, 2048)


def scaled(name: str) -> Trace:
    """The shipped trace with the compute time of a P40 at the paper's batch."""
    trace = load_trace(name)
    seconds = BATCH_SIZE[name] / IMAGES_PER_SECOND[name]
    backward = trace.gradients[-1].ready_seconds
    factor = seconds / (trace.forward_seconds + backward)
    gradients = tuple(
        TraceGradient(
            name=g.name, numel=g.numel, dtype=g.dtype, ready_seconds=g.ready_seconds * factor
        )
        for g in trace.gradients
    )
    return Trace(
        model=trace.model,
        batch_size=BATCH_SIZE[name],
        input_seconds=0.0,
        forward_seconds=trace.forward_seconds * factor,
        update_seconds=0.0,
        gradients=gradients,
    )


def efficiency(trace: Trace, ranks: int, method: str) -> tuple[float, int]:
    """Compute over step, and the number of buckets."""
    planner, chosen = METHODS[method]
    costs = Costs(Cluster.regular(ranks // GROUP, GROUP), {}, LINKS)
    plan = plan_step(planner, trace, costs, allow=(WIRE,), **chosen)
    compute = trace.forward_seconds + trace.gradients[-1].ready_seconds
    assert plan.predicted_step_seconds is not None
    return compute / plan.predicted_step_seconds, len(plan.reduce)


def efficiencies(name: str) -> tuple[str, dict[str, float]]:
    """The table of a model; its efficiencies on 1,024 ranks by method."""
    trace, rows, found = scaled(name), [], {}
    for method in METHODS:
        cells = []
        for ranks in RANKS:
            share, buckets = efficiency(trace, ranks, method)
            cells.append(f"{100 * share:.1f} %")
            if ranks == 1024:
                found[method] = share
                at_1024 = buckets
        rows.append([method, *cells, str(at_1024)])
    head = [name, *(f"{ranks:,} ranks" for ranks in RANKS), "buckets at 1,024"]
    return markdown_table(head, rows), found


def steps() -> str:
    """Rounds of messages of an all-reduce, the paper's count and ours."""
    rows = []
    for ranks in RANKS:
        nodes = ranks // GROUP
        rows.append(
            [
                f"{ranks:,}",
                f"{2 * (ranks - 1):,}",
                f"{4 * (GROUP - 1) + 2 * (nodes - 1):,}",
                f"{2 + 2 * (nodes - 1):,}",
                f"{2 * (GROUP - 1) + 2 * (nodes - 1):,}",
                "4",
            ]
        )
    head = [
        f"ranks, groups of {GROUP}",
        "ring",
        "hierarchical, counted as in the paper",
        "hierarchical, ours",
        "torus of rings",
        "torus, ours",
    ]
    return markdown_table(head, rows)


def main() -> int:
    """Renews or compares the page and prints the figures."""
    parser = options(__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    arguments = parser.parse_args()
    parts, figures, ratios = {"steps": steps()}, [], {}
    for name in IMAGES_PER_SECOND:
        parts[name], found = efficiencies(name)
        base = found["ring, a message a tensor"]
        for method, share in found.items():
            figures.append(Figure(f"{name}, 1,024 ranks, {method}", f"{100 * share:.1f} %"))
        ratios[f"{name}_rule_over_ring"] = found["the paper's rule (four_minutes)"] / base
        ratios[f"{name}_optimum_over_ring"] = found["joint optimum"] / base
    write = not arguments.quick and not arguments.check
    stale = stale_parts(DOCUMENT, parts, write=write)
    if arguments.check and stale:
        print(f"{DOCUMENT.name}: {', '.join(stale)} differ", file=sys.stderr)
    finish("reproduce_four_minutes", figures, ratios, quick=arguments.quick, stale=stale)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
