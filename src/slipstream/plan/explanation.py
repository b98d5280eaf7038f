"""Why a plan is as it is, for a person to follow.

For each bucket: what it waits for, how much of its journey is hidden behind computation, what one
more merge, with the bucket behind it, would cost, and what other ways to average it would take. For
the step: how far it is from what no plan can beat, what limits it, and whether merging helps at
all. All times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.plan.bounds import LowerBound
from slipstream.plan.model import Bucket
from slipstream.plan.timing import BucketTiming, StepTiming
from slipstream.plan.ways import WayTime
from slipstream.words import counted, duration, percent, size


@dataclass(frozen=True)
class BucketReason:
    """One bucket explained.

    half: "reduce" or "gather"; timing: see StepTiming.
    busy_seconds: from its first gradient on the channel was with earlier buckets, so that
    collecting more cost nothing. gathering_seconds: the channel stood idle for its later gradients.
    hidden_seconds, exposed_seconds: of its journey, behind computation, and holding it up.
    merge_seconds: how much later the step would end (earlier, if negative) if it were merged with
    the next bucket; None for the last one, and where the next one has another dtype.
    ways: what the bucket's own way takes, then what each other one that is allowed would, the
    fastest first.
    """

    half: str
    index: int
    bucket: Bucket
    timing: BucketTiming
    busy_seconds: float
    gathering_seconds: float
    hidden_seconds: float
    exposed_seconds: float
    merge_seconds: float | None
    ways: tuple[WayTime, ...] = ()

    def __str__(self) -> str:
        names = self.bucket.gradients
        which = names[0] if len(names) == 1 else f"{len(names)}, {names[0]} to {names[-1]}"
        return (
            f"{self.half} {self.index} ({which}; {size(self.bucket.bytes)}): "
            f"{self._before()}; {self._journey()}{self._if_merged()}."
        )

    def by(self) -> str:
        """By which way, what that takes and what the best other one would; "" where one is all."""
        if len(self.ways) < 2:
            return ""
        own, other, *others = self.ways
        mixed = len({way.costs for way in self.ways}) > 1
        text = f"by {_with_source(own, mixed)} in {duration(own.seconds)}; "
        among = "the other way" if not others else f"the best of {1 + len(others)} others"
        takes = duration(other.seconds)
        if own.seconds == other.seconds:
            takes = "as long"
        return f"{text}{among}, {_with_source(other, mixed)}, would take {takes}"

    def _before(self) -> str:
        if self.half == "gather":
            return f"sets out at {duration(self.timing.start_seconds)}"
        text = f"is ready at {duration(self.timing.ready_seconds)}"
        channel = []
        if self.busy_seconds:
            channel.append(f"was busy for {duration(self.busy_seconds)} meanwhile")
        if self.gathering_seconds:
            channel.append(f"waited {duration(self.gathering_seconds)} for it")
        if channel:
            text += f" (the channel {', then '.join(channel)})"
        if self.timing.waited_seconds:
            text += f", sets out at {duration(self.timing.start_seconds)}"
        return text

    def _journey(self) -> str:
        takes = duration(self.timing.end_seconds - self.timing.start_seconds)
        if self.exposed_seconds == 0:
            return f"its {takes} are hidden"
        if self.hidden_seconds == 0:
            return f"its {takes} are exposed"
        return f"{duration(self.exposed_seconds)} of its {takes} are exposed"

    def _if_merged(self) -> str:
        if self.merge_seconds is None:
            return ""
        later = "later" if self.merge_seconds >= 0 else "earlier"
        cost = "no later" if self.merge_seconds == 0 else None
        cost = cost or f"{duration(abs(self.merge_seconds))} {later}"
        return f"; merged with {self.half} {self.index + 1} the step would end {cost}"


def _with_source(way: WayTime, mixed: bool) -> str:
    """A way's name; where some costs are measured, a way by formula says so."""
    return f"{way} (by formula)" if mixed and way.costs == "formula" else str(way)


@dataclass(frozen=True)
class Explanation:
    """A plan explained.

    bounds: what no plan can beat, the highest last. Steps of other plans with the same ways to
    travel: unmerged_step_seconds with one bucket per tensor, single_step_seconds with one bucket
    (per dtype) in all; best_step_seconds: the least of these, of this plan, and of the exact
    planner's without tolerance or limits. sparse: sentences about what may be sent sparsely.
    """

    timing: StepTiming
    bounds: tuple[LowerBound, ...]
    buckets: tuple[BucketReason, ...]
    unmerged_step_seconds: float
    single_step_seconds: float
    best_step_seconds: float
    sparse: tuple[str, ...] = ()

    @property
    def distance(self) -> float:
        """How far the step is above the highest lower bound, as a share of the bound."""
        return self.timing.step_seconds / self.bounds[-1].step_seconds - 1

    def summary(self) -> list[str]:
        """What limits the step and what merging gains, in sentences."""
        step, best, bound = self.timing.step_seconds, self.best_step_seconds, self.bounds[-1]
        found = [
            f"The step takes {duration(step)}; {duration(self.timing.exposed_seconds)} of it is "
            "communication that nothing hides.",
            f"No plan takes less than {duration(bound.step_seconds)}: {bound.reason}. This one is "
            f"{percent(self.distance)} above that.",
            f"One bucket per tensor would take {duration(self.unmerged_step_seconds)}, a single "
            f"bucket {duration(self.single_step_seconds)}.",
        ]
        found += [*self._carriers(), *self.sparse]
        if step > best * 1.01:
            found.append(
                f"The best buckets would take {duration(best)}; this plan is "
                f"{percent(step / best - 1)} above them."
            )
        if self.unmerged_step_seconds <= best * 1.01:
            found.append("Merging gains next to nothing here: startup is small, or hidden.")
        elif self.single_step_seconds <= best * 1.01:
            found.append(
                "Overlap gains next to nothing here: a single bucket does as well, as startup is "
                "large or gradients come late."
            )
        if bound.kind == "network" and best < bound.step_seconds * 1.05:
            ways = ["send fewer bytes", "use a larger batch a rank"]
            if self.timing.gather is None:
                ways.append("pipeline")
            found.append(
                "The network is the limit, and no merging changes that: "
                f"{', '.join(ways[:-1])} or {ways[-1]}."
            )
        if self.timing.exposed_seconds < 0.01 * step:
            found.append("The computation is the limit: communication is hidden.")
        return found

    def _carriers(self) -> list[str]:
        """How many buckets and bytes each way carries, in a sentence; nothing where one is all."""
        most = max((len(reason.ways) for reason in self.buckets), default=0)
        if most < 2:
            return []
        carried: dict[str, list[int]] = {}
        for reason in self.buckets:
            carried.setdefault(str(reason.ways[0]), []).append(reason.bucket.bytes)
        parts = [
            f"{name} carries {counted(len(sizes), 'bucket')} of {size(sum(sizes))} together"
            if len(sizes) > 1
            else f"{name} carries 1 bucket of {size(sizes[0])}"
            for name, sizes in carried.items()
        ]
        return [f"Of {most} ways, {', '.join(parts)}."]
