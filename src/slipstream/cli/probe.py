"""``slipstream probe``: what collectives and links cost on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from slipstream.cli.options import (
    LONGEST_SECONDS,
    NodesOption,
    OverwriteOption,
    SelectorOption,
    SparseOption,
    ValuesOption,
    refuse_without_density,
)

if TYPE_CHECKING:
    from slipstream.costs import ClusterSpec


_Collectives = Annotated[
    list[str] | None,
    typer.Option(help="What to measure; repeat for several.  [default: all that work here]"),
]
_Wires = Annotated[
    list[str] | None,
    typer.Option(help="With what travelling: float32, bfloat16, float16.  [default: float32]"),
]
_Densities = Annotated[
    list[float] | None,
    typer.Option(
        metavar="SHARE",
        help="Measure sparse sums, too, that send this share of the elements; repeat.",
    ),
]


def probe(
    nodes: NodesOption = None,
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks of each node.  [default: 2]")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=LONGEST_SECONDS,
            help="About how long it may take; large sizes may drop out.",
        ),
    ] = 60.0,
    collective: _Collectives = None,
    wire: _Wires = None,
    density: _Densities = None,
    sparse: SparseOption = None,
    values: ValuesOption = None,
    selector: SelectorOption = None,
    output: Annotated[Path, typer.Option(help="The cluster file to write.")] = Path("cluster.json"),
    overwrite: OverwriteOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the cluster file, alone on standard output.")
    ] = False,
) -> None:
    """Measure collectives from 1 KiB to 256 MiB, the halves of all-reduces, and the links.

    Run it as a job trains: inside torchrun or srun on all nodes, or alone to start ranks here.
    Nothing else should use the network or the processors meanwhile.
    """
    from slipstream.cli.measuring import leave_job, measure
    from slipstream.costs import ClusterSpec
    from slipstream.train.launch.measure import PROBE
    from slipstream.train.recipe import load_recipe
    from slipstream.wires import DENSE_WIRES, WIRE_BYTES

    _check_names(collective or (), DENSE_WIRES, "collective")
    _check_names(wire or (), WIRE_BYTES, "wire")
    # No training: of the recipe only the number of ranks and the limits of waits are used.
    spec = measure(
        ClusterSpec,
        PROBE,
        load_recipe("digits"),
        {
            "seconds": seconds,
            "collectives": collective or [],
            "wires": wire or ["float32"],
            "sparse": _sparse_sums(density or [], sparse, values, selector),
        },
        nodes=nodes,
        per_node=per_node,
        output=output,
        overwrite=overwrite,
        as_json=as_json,
    )
    if spec is not None and not as_json:
        _print(spec, output)
    leave_job()


def _check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"there is no {what} {name!r}; there are {', '.join(known)}")


def _sparse_sums(
    densities: Sequence[float], sparse: str | None, values: str | None, selector: str | None
) -> list[dict[str, Any]]:
    """What each sparse sum to measure is made of. Raises typer's BadParameter."""
    from slipstream.wires import SPARSE_COLLECTIVES, WIRE_BYTES, SelectorName

    refuse_without_density(bool(densities), sparse=sparse, values=values, selector=selector)
    sums = {
        "collective": sparse or "hitopk",
        "values": values or "float32",
        "selector": selector or "exact",
    }
    _check_names([sums["collective"]], SPARSE_COLLECTIVES, "sparse collective")
    _check_names([sums["values"]], WIRE_BYTES, "wire")
    _check_names([sums["selector"]], get_args(SelectorName), "selector")
    _check_shares(densities)
    return [{"density": share, **sums} for share in densities]


def _check_shares(densities: Iterable[float]) -> None:
    for share in densities:
        if not 0 < share <= 1:
            raise typer.BadParameter(f"--density {share}: a density is above 0 and at most 1")


def _print(spec: ClusterSpec, output: Path) -> None:
    from slipstream.costs import fit_floor, fit_line, fit_two_regimes
    from slipstream.words import counted, duration, size

    nodes, ranks = counted(spec.nodes, "node"), counted(spec.cluster.world_size, "rank")
    print(f"{spec.backend} on {nodes}, {ranks}. {spec.note}")
    for cost in spec.costs:
        points, spreads = cost.points or (), cost.spread_seconds or ()
        sends = "" if cost.wire == "float32" else f", {cost.wire} travels"
        print(f"\n{cost.collective} {cost.operation}{sends}")
        print(f"{'size':>10}  {'median':>9}  {'spread':>9}")
        for (num_bytes, seconds), spread in zip(points, spreads, strict=True):
            print(f"{size(num_bytes):>10}  {duration(seconds):>9}  {duration(spread):>9}")
        print()
        for fit in (fit_floor, fit_two_regimes, fit_line):
            print(fit(points))
    if spec.links is not None:
        print()
        for name, link in (("inside nodes", spec.links.intra), ("between nodes", spec.links.inter)):
            if link is not None:
                rate = 8e-9 / link.seconds_per_byte if link.seconds_per_byte else float("inf")
                print(
                    f"links {name}: {duration(link.latency_seconds)}, {rate:.3g} Gbit/s, adding "
                    f"{link.reduce_seconds_per_byte * 1e9:.3g} ns/B"
                )
    print(f"\nwritten to {output}")
