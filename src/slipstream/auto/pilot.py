"""What auto does between one finished round and the next, on every rank alike.

    learn | profile | time | agree, probe, plan, swap | time | say what came of it | ... | once more

The course is a generator: each `yield` is one round, so that the number of rounds decides when
something happens, never a clock. What ranks must agree on goes through their peers.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from slipstream.auto import telling
from slipstream.auto.decision import StepTime, Verdict, decide, of_these
from slipstream.auto.settings import HALVES, AutoSettings
from slipstream.auto.sizes import sizes_to_probe
from slipstream.cluster import Cluster
from slipstream.comm.peers import Peers
from slipstream.costs import Costs
from slipstream.errors import (
    CostError,
    PlanError,
    RanksDiffer,
    SlipstreamError,
    TraceError,
    UnsupportedModel,
)
from slipstream.measure import Profiler, probe_budgeted, ways_of
from slipstream.measure.clocks import HostClock
from slipstream.measure.probing import Way
from slipstream.plan.halves import charged_bytes
from slipstream.sync import GradientSync
from slipstream.sync.planning import PlanKeeper
from slipstream.trace import Trace

T = TypeVar("T")
Course = Generator[None, None, T]

_WARMUP = 2
_PATIENCE = 3
_HARMLESS = (TraceError, CostError, PlanError, RanksDiffer, UnsupportedModel)
"""What all ranks find out together, and what training can go on without."""

_UNDEFERRED = (
    "planner 'pipelined' takes a deferred optimizer: optimizer = sync.deferred(optimizer)."
)
_log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Surroundings:
    """What is measured, the model and the ranks over the engine's own group, and who is told.

    keeper: of the engine's plans.
    """

    keeper: PlanKeeper
    model: weakref.ref[nn.Module]
    model_name: str
    peers: Peers
    group: dist.ProcessGroup
    store: Store | None
    cluster: Cluster
    device: torch.device
    timeout_seconds: float


class Pilot:
    """Measures and plans for one engine, until it has nothing more to do.

    is_settled: a record says already what auto decided; nothing is measured until other parameters
    become trainable.
    """

    def __init__(
        self,
        engine: GradientSync,
        around: Surroundings,
        settings: AutoSettings,
        *,
        is_settled: bool,
    ) -> None:
        self._engine = engine
        self._keeper = around.keeper
        self._around = around
        self._settings = settings
        self._clock = settings.clock or time.perf_counter
        self._switches = around.keeper.switches
        self._course: Course[None] | None = None
        if not is_settled:
            self._begin()

    def round_finished(self) -> None:
        """One more round is over, with nothing in flight. Raises RankFailure."""
        if self._switches != self._keeper.switches:
            self._switches = self._keeper.switches
            self.close()
            self._begin()
        if self._course is not None:
            try:
                next(self._course)
            except StopIteration:
                self._course = None

    def restart(self, settings: AutoSettings) -> None:
        """Measures and plans anew, with other settings."""
        self.close()
        self._settings = settings
        self._begin()

    def close(self) -> None:
        """Takes every hook off the model; safe to call twice."""
        if self._course is not None:
            self._course.close()
            self._course = None

    def _begin(self) -> None:
        self._course = self._whole_course()
        next(self._course)  # to its first yield: waiting for a round

    def _whole_course(self) -> Course[None]:
        yield  # the round after which the ready order is known
        costs = yield from self._improve(self._settings.costs)
        # A step whose parts overlap with the next one's cannot be profiled.
        if costs is not None and self._engine.plan.gather is None:
            yield from _rounds(self._settings.again_after_steps)
            yield from self._improve(costs, is_first=False)

    def _improve(self, costs: Costs | None, *, is_first: bool = True) -> Course[Costs | None]:
        """Measures, plans, and swaps where that pays; returns the costs, None without success."""
        engine = self._engine
        try:
            if self._settings.gathers and not engine.is_deferred:
                raise PlanError(_UNDEFERRED)
            trace = yield from self._profiled()
            before = yield from self._timed(1)
            costs = costs or self._probed(trace, before)
            verdict = self._agreed(trace, costs, before)
        except _HARMLESS as error:
            line = telling.failed(self._keeper.step, engine.plan, str(error))
            self._keeper.annotate(line, None)
            self._tell(logging.WARNING, line)
            return None
        if verdict.objection:
            line = telling.kept(self._keeper.step, engine.plan, verdict, before)
            self._keeper.annotate(line, before.seconds)
            self._tell(logging.INFO if is_first else logging.DEBUG, line)
        else:
            yield from self._swap(verdict, before)
        return costs

    def _swap(self, verdict: Verdict, before: StepTime) -> Course[None]:
        """Goes over to the verdict's plan, and back where it turns out slower."""
        engine, old = self._engine, self._engine.plan
        swap = telling.swapped(self._keeper.step, old, verdict)
        self._keeper.annotate("", before.seconds)
        engine.use_plan(verdict.plan, swap)
        after = yield from self._timed(_WARMUP)
        is_slower = after.is_slower_than(before)
        line = telling.measured(swap, verdict, before, after, old if is_slower else None)
        self._keeper.annotate(line, after.seconds)
        if is_slower:
            engine.use_plan(old, line)
        self._tell(logging.INFO, line)

    def _profiled(self) -> Course[Trace]:
        """The trace of some steps, merged over ranks."""
        around, steps = self._around, self._settings.steps
        model = around.model()
        assert model is not None, "a round has just finished"
        clock = self._settings.clock
        profiler = Profiler(
            model,
            steps=steps,
            warmup=_WARMUP,
            waited=lambda: self._engine.exposed_seconds,
            clock=HostClock(clock) if clock else None,
        )
        del model
        try:
            for _ in range(_PATIENCE):
                yield from _rounds(_WARMUP + steps + 1)
                if all(around.peers.gather(profiler.done, "profiling")):
                    break
            # What a planner needs does not depend on the batch size, which may not be known.
            trace = profiler.trace(around.peers, model=around.model_name, batch_size=1)
        finally:
            profiler.close()
        return of_these(trace, self._engine.plan)

    def _timed(self, warmup: int) -> Course[StepTime]:
        """How long steps take as they are, on the slowest rank."""
        yield from _rounds(warmup)
        moments = [self._clock()]
        for _ in range(self._settings.steps):
            yield
            moments.append(self._clock())
        mine = StepTime.of([end - start for start, end in pairwise(moments)])
        numbers = [mine.seconds, mine.error_seconds]
        everyone = self._around.peers.gather(numbers, "comparing step times")
        return StepTime(*max(everyone))

    def _probed(self, trace: Trace, step: StepTime) -> Costs:
        """The cluster's costs, in a time that is short beside the training.

        Of what buckets may use, and of what they use now: that is what a new plan is compared with.
        """
        around, settings = self._around, self._settings
        ways: dict[Way, None] = dict.fromkeys(
            ways_of(around.cluster, settings.collectives, settings.wires)
        )
        if settings.sparsity is not None:
            ways[settings.sparsity.collective, settings.sparsity.wire] = None
        for bucket in self._engine.plan.reduce:
            ways[bucket.collective, bucket.wire] = None
        spec = probe_budgeted(
            around.group,
            around.cluster,
            sizes_to_probe([charged_bytes(gradient) for gradient in trace.gradients]),
            settings.probe_budget_seconds(len(ways), step.seconds),
            operations=("all_reduce", *(HALVES if settings.gathers else ())),
            ways=tuple(ways),
            thorough=False,
            device=around.device,
            store=around.store,
            timeout_seconds=around.timeout_seconds,
            clock=self._clock,
        )
        return Costs.of(spec)

    def _agreed(self, trace: Trace, costs: Costs, before: StepTime) -> Verdict:
        """Rank 0's verdict. Raises PlanError, on every rank, where it can make none."""
        answer: Any = None
        if self._around.peers.rank == 0:
            try:
                verdict = decide(trace, costs, self._engine.plan, before, self._settings)
                answer = {"verdict": verdict.model_dump_json()}
            except SlipstreamError as error:
                answer = {"error": str(error)}
        answer = self._around.peers.gather(answer, "planning")[0]
        if "error" in answer:
            raise PlanError(answer["error"])
        return Verdict.model_validate_json(answer["verdict"])

    def _tell(self, level: int, line: str) -> None:
        if self._around.peers.rank == 0:
            _log.log(level, line)


def _rounds(count: int) -> Course[None]:
    for _ in range(count):
        yield
