"""What collectives cost on a cluster: measured curves, formulas on links, fits (no torch here)."""

from slipstream.costs.cluster_file import (
    ClusterSpec,
    CollectiveName,
    Density,
    Link,
    Links,
    MeasuredCost,
    Operation,
    Wire,
)
from slipstream.costs.costs import Choice, Costs
from slipstream.costs.curves import Curve, Line, Minimum, Table, least_of
from slipstream.costs.formulas import ring, slowest_link

__all__ = [
    "Choice",
    "ClusterSpec",
    "CollectiveName",
    "Costs",
    "Curve",
    "Density",
    "Line",
    "Link",
    "Links",
    "MeasuredCost",
    "Minimum",
    "Operation",
    "Table",
    "Wire",
    "least_of",
    "ring",
    "slowest_link",
]
