"""Costs: the curve of each collective and wire on a cluster, measured where possible."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from slipstream.cluster import Cluster
from slipstream.costs.cluster_file import ClusterSpec, Links, Operation
from slipstream.costs.curves import Curve
from slipstream.costs.formulas import ALL_REDUCES, SPARSE_SUMS, ring
from slipstream.errors import CostError
from slipstream.wires import WIRE_BYTES, Wire, wires_of

CostKey = tuple[str, Operation, Wire]
"""What a curve is for: collective, operation, wire."""

_HALVES_BY_FORMULA = ("native", "ring")


@dataclass(frozen=True)
class Choice:
    """One way to average a bucket, with what it costs."""

    collective: str
    wire: Wire
    curve: Curve


@dataclass(frozen=True)
class Costs:
    """What every collective costs on one cluster.

    A measured curve wins over a formula on the links. `native` is taken for a ring where it was not
    measured. Build it from a cluster file (`of`) or from curves alone (`from_curves`).
    """

    cluster: Cluster
    measured: Mapping[CostKey, Curve]
    links: Links | None = None

    @classmethod
    def of(cls, spec: ClusterSpec) -> Costs:
        """The costs that a cluster file holds."""
        measured: dict[CostKey, Curve] = {
            (cost.collective, cost.operation, cost.wire): cost.curve() for cost in spec.costs
        }
        return cls(spec.cluster, measured, spec.links)

    @classmethod
    def from_curves(
        cls, cluster: Cluster, curves: Mapping[str, Curve], operation: Operation = "all_reduce"
    ) -> Costs:
        """Costs of float32 collectives by name, for studies without a cluster file."""
        return cls(cluster, {(name, operation, "float32"): curve for name, curve in curves.items()})

    def curve(
        self,
        collective: str = "native",
        operation: Operation = "all_reduce",
        wire: Wire = "float32",
    ) -> Curve:
        """T(M) of one collective with one wire.

        Raises CostError when it was not measured and no formula on the links gives it.
        """
        measured = self.measured.get((collective, operation, wire))
        if measured is not None:
            return measured
        what = f"{operation} by {collective!r} with wire {wire!r}"
        by_formula = _by_formula(operation, wire)
        if collective not in by_formula:
            known = ", ".join(sorted({name for name, _, _ in self.measured})) or "none"
            raise CostError(
                f"Nobody has measured {what} (measured collectives: {known}); measure it with "
                "`slipstream probe`, or leave it out of what the planner may use."
            )
        if self.links is None:
            raise CostError(
                f"Nobody has measured {what}, and the cluster's `links` that could tell are "
                "missing; measure it with `slipstream probe`, or add `links` to the cluster file."
            )
        if not isinstance(wire, str):
            return SPARSE_SUMS[collective](self.links, self.cluster, wire)
        share = WIRE_BYTES[wire] / WIRE_BYTES["float32"]
        if operation == "all_reduce":
            return ALL_REDUCES[collective](self.links, self.cluster, share)
        return ring(self.links, self.cluster, operation, share)

    @property
    def collectives(self) -> tuple[str, ...]:
        """The dense ones of which an all-reduce was measured; `native` where none was."""
        found = dict.fromkeys(
            name
            for name, operation, wire in self.measured
            if operation == "all_reduce" and isinstance(wire, str)
        )
        return tuple(found) or ("native",)

    def choices(
        self,
        collectives: Sequence[str] = ("native",),
        wires: Sequence[Wire] = ("float32",),
        operation: Operation = "all_reduce",
    ) -> tuple[Choice, ...]:
        """Every allowed way to average a bucket that there is and that has a cost, in this order.

        Raises CostError when there is none.
        """
        found, missing = [], []
        for collective in collectives:
            for wire in wires:
                if isinstance(wire, str) and wire not in wires_of(collective):
                    missing.append(CostError(f"{collective!r} does not send {wire}."))
                    continue
                try:
                    found.append(Choice(collective, wire, self.curve(collective, operation, wire)))
                except CostError as error:
                    missing.append(error)
        if not found:
            if not missing:
                raise CostError("A planner must be allowed at least one collective and one wire.")
            raise missing[0]
        return tuple(found)

    def at(self, cluster: Cluster) -> Costs:
        """The costs on a cluster of another shape with the same links, by formula.

        Raises CostError when the shape differs and there are no links.
        """
        if cluster == self.cluster:
            return self
        if self.links is None:
            raise CostError(
                f"The costs were measured on {self.cluster} and {cluster} are asked for; that "
                "takes `links` in the cluster file."
            )
        return Costs(cluster, {}, self.links)


def _by_formula(operation: Operation, wire: Wire) -> Container[str]:
    """The collectives whose costs follow from links."""
    if not isinstance(wire, str):
        return SPARSE_SUMS if operation == "all_reduce" else ()
    return ALL_REDUCES if operation == "all_reduce" else _HALVES_BY_FORMULA
