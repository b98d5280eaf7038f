"""What collectives cost on a cluster: measured curves, formulas on links, fits (no torch here)."""

from slipstream.costs.cluster_file import (
    ClusterSpec,
    Link,
    Links,
    MeasuredCost,
    Operation,
)
from slipstream.costs.costs import Choice, CostKey, Costs
from slipstream.costs.curves import Curve, Floor, Line, Minimum, Table, least_of
from slipstream.costs.fits import Fit, fit_floor, fit_line, fit_two_regimes, line_near
from slipstream.costs.formulas import ring, slowest_link
from slipstream.wires import CollectiveName, Density, Wire

__all__ = [
    "Choice",
    "ClusterSpec",
    "CollectiveName",
    "CostKey",
    "Costs",
    "Curve",
    "Density",
    "Fit",
    "Floor",
    "Line",
    "Link",
    "Links",
    "MeasuredCost",
    "Minimum",
    "Operation",
    "Table",
    "Wire",
    "fit_floor",
    "fit_line",
    "fit_two_regimes",
    "least_of",
    "line_near",
    "ring",
    "slowest_link",
]
