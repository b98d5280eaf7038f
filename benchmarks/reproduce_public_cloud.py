"""Sparse sums on 16 nodes of 8 cards with 25 Gbit/s: docs/reproduction/public-cloud.md.

By formula and simulation: bytes and times between nodes of the worked example, break-even
densities, and ResNet-50 with dense and sparse collectives, planned by the library on the shipped
trace. Nothing is timed, so the same code gives the same tables.

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
from slipstream.costs.formulas import break_even_density
from slipstream.plan import plan_step
from slipstream.plan.sparsity import Sparsity
from slipstream.simulate import load_trace
from slipstream.trace import Trace, TraceGradient
from slipstream.wires import Density, Wire

DOCUMENT = Path(__file__).parents[1] / "docs" / "reproduction" / "public-cloud.md"
CARDS = 8
RATE = 25e9 / 8
LINKS = Links(
    intra=Link(latency_seconds=5e-6, seconds_per_byte=1 / 130e9, reduce_seconds_per_byte=0.0),
    inter=Link(latency_seconds=30e-6, seconds_per_byte=1 / RATE, reduce_seconds_per_byte=0.0),
    select_seconds_per_byte=4 / 900e9,
)
"""NVLink of 130 GB/s, 25 Gbit/s Ethernet; selecting passes the data four times at 900 GB/s."""
BETWEEN = Links(
    intra=Link(latency_seconds=0.0, seconds_per_byte=0.0),
    inter=Link(latency_seconds=0.0, seconds_per_byte=1 / RATE),
    select_seconds_per_byte=0.0,
)
"""Bytes between nodes alone."""
NUMEL = 25_557_032
BATCH_SIZE = 256
SECONDS = {96: BATCH_SIZE / (328_700 / 128), 224: BATCH_SIZE / (123_500 / 128)}
"""A step of 256 images by side length; see the page."""
WAYS: dict[str, tuple[str, Wire]] = {
    "torus (2DTAR)": ("torus", "float16"),
    "hitopk, 0.01": ("hitopk", Density(density=0.01, values="float16")),
    "hitopk, 0.001": ("hitopk", Density(density=0.001, values="float16")),
    "naive_topk, 0.001": ("naive_topk", Density(density=0.001, values="float16")),
    "a2a_topk, 0.01": ("a2a_topk", Density(density=0.01, values="float16")),
}
_SPARSE = {
    "collectives": ("torus",),
    "allow": ("float16",),
    "sparsity": Sparsity(density=0.01, values="float16"),
}
METHODS: dict[str, dict[str, Any]] = {
    "one message, torus in 16 bits": {
        "planner": "single",
        "collectives": ("torus",),
        "allow": ("float16",),
    },
    "one message, hitopk 0.01": {"planner": "single", **_SPARSE},
    "dense, ring": {"collectives": ("ring",), "allow": ("float32",)},
    "dense, torus": {"collectives": ("torus",), "allow": ("float32",)},
    "dense, torus in 16 bits": {"collectives": ("torus",), "allow": ("float16",)},
    "hitopk, 0.01": _SPARSE,
    "hitopk, 0.001": {**_SPARSE, "sparsity": Sparsity(density=0.001, values="float16")},
}
NODES = (2, 4, 16, 64, 256)


def example() -> tuple[str, dict[str, float]]:
    """What a node's card sends for ResNet-50's gradients in 16 bits, and how long it takes."""
    costs, rows, found = Costs(Cluster.regular(16, CARDS), {}, BETWEEN), [], {}
    for name, (collective, wire) in WAYS.items():
        seconds = costs.curve(collective, "all_reduce", wire).seconds(4 * NUMEL)
        found[name] = seconds
        rows.append([name, f"{seconds * RATE / 1e6:.1f} MB", f"{seconds * 1e3:.2f} ms"])
    return markdown_table(["16 nodes of 8", "a card sends", "at 25 Gbit/s"], rows), found


def break_even() -> str:
    """The density above which hitopk sends more between nodes than a torus, by nodes."""
    rows = []
    for nodes in NODES:
        cluster = Cluster.regular(nodes, CARDS)
        shares = [break_even_density(cluster, values) for values in ("float32", "float16")]
        rows.append([str(nodes), *(f"{100 * share:.2f} %" for share in shares)])
    return markdown_table(["nodes", "float32 values", "16-bit values"], rows)


def scaled(side: int) -> Trace:
    """ResNet-50's shipped trace with the compute of a step at this image size."""
    trace = load_trace("resnet50")
    backward = trace.gradients[-1].ready_seconds
    factor = SECONDS[side] / (trace.forward_seconds + backward)
    gradients = tuple(
        TraceGradient(name=g.name, numel=g.numel, ready_seconds=g.ready_seconds * factor)
        for g in trace.gradients
    )
    return Trace(
        model=trace.model,
        batch_size=BATCH_SIZE,
        input_seconds=0.0,
        forward_seconds=trace.forward_seconds * factor,
        update_seconds=0.0,
        gradients=gradients,
    )


def throughput(side: int) -> tuple[str, dict[str, float]]:
    """Images a second of all cards by method and nodes; efficiencies on 16 nodes."""
    trace, rows, found = scaled(side), [], {}
    compute = trace.forward_seconds + trace.gradients[-1].ready_seconds
    for name, chosen in METHODS.items():
        cells = []
        for nodes in (1, 4, 16, 64):
            costs = Costs(Cluster.regular(nodes, CARDS), {}, LINKS)
            ways = {key: value for key, value in chosen.items() if key != "planner"}
            plan = plan_step(chosen.get("planner", "optimal"), trace, costs, **ways)
            step = plan.predicted_step_seconds
            assert step is not None
            rate = nodes * CARDS * BATCH_SIZE / step
            cells.append(f"{rate:,.0f} ({100 * compute / step:.1f} %)")
            if nodes == 16:
                found[name] = compute / step
        rows.append([name, *cells])
    head = [f"{side} x {side}", *(f"{nodes * CARDS} cards" for nodes in (1, 4, 16, 64))]
    return markdown_table(head, rows), found


def main() -> int:
    """Renews or compares the page and prints the figures."""
    parser = options(__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    arguments = parser.parse_args()
    table, seconds = example()
    parts, ratios = {"example": table, "break-even": break_even()}, {}
    figures = [Figure(f"16 x 8, {name}", f"{s * 1e3:.2f} ms") for name, s in seconds.items()]
    for side in SECONDS:
        parts[f"throughput-{side}"], found = throughput(side)
        for name, share in found.items():
            figures.append(Figure(f"{side} x {side}, 128 cards, {name}", f"{100 * share:.1f} %"))
            ratios[f"{side}: {name}"] = share
    write = not arguments.quick and not arguments.check
    stale = stale_parts(DOCUMENT, parts, write=write)
    if arguments.check and stale:
        print(f"{DOCUMENT.name}: {', '.join(stale)} differ", file=sys.stderr)
    finish("reproduce_public_cloud", figures, ratios, quick=arguments.quick, stale=stale)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
