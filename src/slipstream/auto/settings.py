"""What `plan="auto"` may be told, checked when the engine is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Self, cast

from slipstream.cluster import Cluster
from slipstream.comm.chosen import check as check_collective
from slipstream.comm.chosen import check_backend
from slipstream.costs import ClusterSpec, CostKey, Costs, Line, Operation
from slipstream.errors import CostError, PlanError
from slipstream.plan import PLANNER_NAMES, plan_step
from slipstream.plan.allowed import HALF_WAY, OWN_COLLECTIVES, check_own
from slipstream.plan.sparsity import Sparsity
from slipstream.plan.ways import check_allowed
from slipstream.trace import Trace, TraceGradient
from slipstream.wires import DENSE_WIRES, WIRE_BYTES, CollectiveName, DenseWire

STEP_PLANNERS = ("optimal", "mgwfbp", "four_minutes", "pipelined")
"""Planners that need measurements: naming one as the plan means auto with it."""
_OWN = ("costs", "probe_seconds", "probe_steps", "steps", "again_after_steps", "clock")
HALVES: tuple[Operation, ...] = ("reduce_scatter", "all_gather")
"""What a plan that gathers does instead of an all-reduce."""
_A_FURTHER_WAY = 1 / 3
"""Of the time that a single way is probed in: what each further one adds."""
_MOST_TIMES = 4.0


@dataclass(frozen=True)
class AutoSettings:
    """How auto measures and plans.

    planner: who plans once all is measured ("pipelined" needs a deferred optimizer);
    planner_options: the keywords that `plan_step` takes for it; of them `collectives` and `allow`,
    by default "native" and "float32", also say what is probed. costs: of the cluster; None means
    that they are probed: see `probe_budget_seconds`. steps: that are profiled, and that are timed
    before and after a change. again_after_steps: when the model is profiled once more. clock:
    seconds from any fixed point on, for everything that is measured; None means the device's own.
    """

    planner: str = "optimal"
    planner_options: Mapping[str, Any] = field(default_factory=dict)
    costs: Costs | None = None
    probe_seconds: float = 3.0
    probe_steps: int = 30
    steps: int = 8
    again_after_steps: int = 1000
    clock: Callable[[], float] | None = None

    @classmethod
    def of(cls, planner: str, options: Mapping[str, Any]) -> Self:
        """The settings in `plan_options` of `plan="auto"`, or of a planner that stands for it.

        Raises PlanError for what cannot be planned with.
        """
        named = dict(options)
        own = {name: named.pop(name) for name in _OWN if name in named}
        if planner == "auto":
            planner = named.pop("planner", cls.planner)
        elif "planner" in named:
            raise PlanError(
                f"plan={planner!r} names its planner already; leave 'planner' out of plan_options."
            )
        if isinstance(own.get("costs"), ClusterSpec):
            own["costs"] = Costs.of(own["costs"])
        settings = cls(planner=planner, planner_options=named, **own)
        settings.check()
        return settings

    def check(self) -> None:
        """Raises PlanError for settings out of bounds, and whatever the planner would refuse."""
        if self.planner not in PLANNER_NAMES:
            known = ", ".join(PLANNER_NAMES)
            raise PlanError(f"auto has no planner {self.planner!r}; it has {known}.")
        if not (math.isfinite(self.probe_seconds) and self.probe_seconds > 0):
            raise PlanError(f"probe_seconds is {self.probe_seconds}; a probe takes some time.")
        for name in ("probe_steps", "steps", "again_after_steps"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; it is at least 1.")
        _check_names(self.planner_options, "collectives", DENSE_WIRES)
        _check_names(self.planner_options, "allow", WIRE_BYTES)
        if "collectives" in self.planner_options:
            check_own(self.planner, self.planner_options["collectives"])
        costs = _ITS_COSTS
        if self.sparsity is not None:
            way: CostKey = (self.sparsity.collective, "all_reduce", self.sparsity.wire)
            costs = replace(costs, measured={**costs.measured, way: Line(1.0, 0.0)})
        try:
            plan_step(self.planner, _A_STEP, costs, **self.planner_options)
        except CostError as error:
            raise PlanError(f"auto cannot plan with these options: {error}") from error

    def on(self, cluster: Cluster, backend: str = "gloo", device_type: str = "cpu") -> Self:
        """The settings for a cluster, with its own costs where some are given.

        backend: of the group that averages; device_type: of the gradients. Raises PlanError for a
        collective that does not work there. Raises CostError where the costs given lack something
        that may be used, or `native`, by which auto begins.
        """
        for name in self.collectives:
            check_collective(name, "float32", cluster)
            check_backend(name, backend, device_type)
        if self.sparsity is not None:
            check_collective(self.sparsity.collective, self.sparsity.wire, cluster)
            check_backend(self.sparsity.collective, backend, device_type)
        if self.costs is None:
            return self
        costs = self.costs.at(cluster)
        costs.curve()
        if not self.gathers:
            check_allowed(costs, self.collectives, self.wires)
        return replace(self, costs=costs)

    @property
    def collectives(self) -> Sequence[CollectiveName]:
        """What buckets may use, and so what is probed."""
        own = OWN_COLLECTIVES.get(self.planner)
        named = own or self.planner_options.get("collectives", ("native",))
        return cast(Sequence[CollectiveName], tuple(dict.fromkeys(named)))

    @property
    def wires(self) -> Sequence[DenseWire]:
        """What may travel."""
        named = HALF_WAY[1:] if self.gathers else self.planner_options.get("allow", ("float32",))
        return cast(Sequence[DenseWire], tuple(dict.fromkeys(named)))

    @property
    def sparsity(self) -> Sparsity | None:
        """What may be sent sparsely."""
        found = self.planner_options.get("sparsity")
        if not (found is None or isinstance(found, Sparsity)):
            raise PlanError(f"sparsity is {found!r}; it is a slipstream.Sparsity, or None.")
        return found

    def permitting(self, sparsity: Sparsity | None) -> Self:
        """The same settings with other things that may be sent sparsely."""
        return replace(self, planner_options={**self.planner_options, "sparsity": sparsity})

    def probe_budget_seconds(self, num_ways: int, step_seconds: float) -> float:
        """The time in which so many ways are probed, beside steps that take `step_seconds`.

        For one way the shorter of probe_seconds and the time of probe_steps steps. Each further one
        adds a third of that, as those that are slow are soon given up; four times it at most.
        """
        alone = min(self.probe_seconds, self.probe_steps * step_seconds)
        return alone * min(1 + (num_ways - 1) * _A_FURTHER_WAY, _MOST_TIMES)

    @property
    def gathers(self) -> bool:
        """Whether the planner's plans put updates off into the next forward."""
        return self.planner == "pipelined"

    def describe(self) -> str:
        """The settings in words, equal on ranks that will do the same."""
        source = (
            "given costs"
            if self.costs
            else f"a probe of {self.probe_seconds:g} s or {self.probe_steps} steps"
        )
        return (
            f"plan 'auto' by {self.planner!r} with {dict(sorted(self.planner_options.items()))}, "
            f"{source}, {self.steps} steps, again after {self.again_after_steps}"
        )


def _check_names(options: Mapping[str, Any], option: str, known: Iterable[str]) -> None:
    """Raises PlanError where an option is no list of known names."""
    names, choices = options.get(option, ()), list(known)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise PlanError(f"{option} is {names!r}; it is a list of names, such as {choices[:1]}.")
    for name in names:
        if name not in choices:
            close = get_close_matches(str(name), choices, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(choices)}."
            raise PlanError(f"{option} holds {name!r}, which there is not; {hint}")


_A_STEP = Trace(
    model="a step to try options on",
    batch_size=1,
    input_seconds=0.0,
    forward_seconds=0.0,
    update_seconds=0.0,
    gradients=(TraceGradient(name="weight", numel=1, ready_seconds=1.0, needed_seconds=0.0),),
)
_ALL_REDUCES: list[CostKey] = [
    (name, "all_reduce", wire) for name, wires in DENSE_WIRES.items() for wire in wires
]
_ITS_COSTS = Costs(
    Cluster((2,)),
    dict.fromkeys(
        [*(("native", name, "float32") for name in HALVES), *_ALL_REDUCES], Line(1.0, 0.0)
    ),
)
