"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MOST_NODES = 2**20
"""So many nodes can be planned and simulated for."""

LONGEST_SECONDS = 30 * 86400.0
"""No time that a command is given is longer: 30 days."""

RecipeArgument = Annotated[
    str | None,
    typer.Argument(help="A shipped recipe (fashion, digits) or a TOML file.  [default: fashion]"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.FIELD=VALUE", help="Change a field of the recipe."),
]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="Nodes; logical ones where ranks start here.")
]
PerNodeOption = Annotated[int | None, typer.Option(min=1, help="Ranks of each node.")]

OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace files that exist where results go.")
]

TraceOption = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="A shipped trace (resnet50, ...) or a trace file.")
]
ClusterOption = Annotated[
    Path, typer.Option(metavar="FILE", help="The cluster: its measured costs, its links, or both.")
]
ToleranceOption = Annotated[
    float, typer.Option(min=0, help="How far from the optimum a plan with fewer buckets may be.")
]
CollectiveOption = Annotated[
    list[str] | None,
    typer.Option(help="What buckets may use; repeat for several.  [default: all measured]"),
]
WireOption = Annotated[
    list[str] | None,
    typer.Option(help="What may travel: float32, bfloat16, float16; repeat.  [default: float32]"),
]
DensityOption = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Large gradients may send only this share of their elements: 0.01.  [default: all]",
    ),
]
SparseOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="By what then: hitopk, a2a_topk, naive_topk.  [default: hitopk]"
    ),
]
ValuesOption = Annotated[
    str | None,
    typer.Option(
        metavar="WIRE",
        help="As what those elements travel: float32, bfloat16, float16.  [default: float32]",
    ),
]
SelectorOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What selects them: exact, mstopk, sampled, reference.  [default: exact]",
    ),
]
DenseOption = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Gradients to send in full all the same; repeat."),
]
JitterOption = Annotated[
    float, typer.Option(min=0, help="Spread of a rank's computation from step to step, as 0.05.")
]
StragglersOption = Annotated[
    str,
    typer.Option(
        metavar="SHARE[xFACTOR]",
        help="How often a rank straggles, and how many times slower it is then: 0.001x3.",
    ),
]
NetworkJitterOption = Annotated[
    float, typer.Option(min=0, help="Spread of a bucket's time on the network, as 0.1.")
]
StepsOption = Annotated[int, typer.Option(min=1, help="How many steps are drawn.")]
SeedOption = Annotated[int, typer.Option(min=0, help="The same seed draws the same steps.")]


def refuse_without_density(is_given: bool, **others: object) -> None:
    """Raises typer's BadParameter where options speak of what nothing makes sparse."""
    for name, value in others.items():
        if value and not is_given:
            raise typer.BadParameter(
                f"--{name} says how a share of the elements is sent, and --density, which says how "
                "large it is, is not given"
            )
