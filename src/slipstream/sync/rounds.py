"""One synchronised backward after the other: what happens in autograd's hooks, and when.

first hook of a backward    the plan is changed if that is due; a round is opened
each hook                   its gradient goes into its bucket, full buckets go out
end of backward             the rest goes out; with wait="backward" the averages are awaited
next backward, or a step    with wait="update" they are awaited here

With a plan that gathers a round goes on after backward: a step sends the averages on their way, the
next forward takes them as it needs them, and the round ends with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.errors import SlipstreamError
from slipstream.plan import Plan
from slipstream.sparsify import Momentum
from slipstream.sync.backward_watch import BackwardWatch, current_task
from slipstream.sync.means import Means
from slipstream.sync.owed import Owed, merged
from slipstream.sync.pipelined_reducer import PipelinedReducer
from slipstream.sync.planning import PlanKeeper, refuse_undeferred
from slipstream.sync.reducer import Reducer
from slipstream.sync.report import StepTimeline, Travel
from slipstream.sync.sparse_buckets import SparseTotals


class Rounds:
    """Runs the rounds of one model, under the plans that `keeper` makes; listens to its hooks.

    enabled: whether the next backward averages; wait_for_update: whether it returns before the
    averages are there. sparse_totals: of all rounds so far. scale_of: tells the loss scale of the
    next backward; scale: that in which residuals are. momentum: of momentum correction. task: see
    `Listener`. flush: does the updates that a deferred optimizer has put off. exposed_seconds: how
    long the training thread stood waiting in the last finished round.
    """

    def __init__(self, means: Means, keeper: PlanKeeper) -> None:
        self.enabled = True
        self.wait_for_update = False
        self.task = -1
        self.broken: SlipstreamError | None = None
        self.flush: Callable[[], None] | None = None
        self._means = means
        self._keeper = keeper
        self._watch = BackwardWatch(self._backward_ended)
        self._open = False
        self._last_task = -1
        self._step = 0
        self._finished: list[Travel] = []
        self._gathered: list[Travel] = []
        self.exposed_seconds = 0.0
        self.sparse_totals = SparseTotals()
        self.scale_of: Callable[[], float] | None = None
        self.scale = 1.0
        self.momentum: Momentum | None = None
        self._parked: list[Owed] = []
        self.reducer: Reducer | PipelinedReducer = self._build(keeper.first_plan(means.params))

    @property
    def in_flight(self) -> bool:
        """Whether a backward has ended whose averages have not been awaited."""
        return self.reducer.in_flight and not self._open

    @property
    def plan(self) -> Plan:
        """The plan with which the next backward starts."""
        return self._keeper.next_plan or self.reducer.plan

    def wait(self) -> None:
        """Returns when the averages of the last backward are there. Raises RankFailure."""
        if self.broken is not None:
            raise self.broken
        if self.flush is not None:
            self.flush()
        if self.in_flight:
            self._finish()

    def timeline(self) -> StepTimeline:
        """When the buckets of the last finished round travelled."""
        return StepTimeline(
            tuple(travel.times(index) for index, travel in enumerate(self._finished)),
            self.exposed_seconds,
            tuple(travel.times(index) for index, travel in enumerate(self._gathered)),
        )

    def owed(self) -> list[Owed]:
        """What this rank has not sent yet, as views; to be read between two rounds."""
        sparse = self.reducer.sparse if isinstance(self.reducer, Reducer) else None
        return [*self._parked, *(sparse.owed() if sparse is not None else ())]

    def owe(self, owed: list[Owed]) -> None:
        """What this rank owes from now on, in place of what it did; all ranks call it alike.

        With sparse buckets it communicates. Raises RankFailure when a rank does not come.
        """
        if not isinstance(self.reducer, Reducer):
            self._parked = merged(owed)  # plans that gather send everything
            return
        self._parked = []
        try:
            self.reducer.sparse.take_over(owed)
        except RuntimeError as error:
            doing = f"moving what is still to be sent before step {self._step + 1}"
            raise self._break(self._means.peers.failure(error, doing)) from error

    def correct_momentum(self, momentum: Momentum) -> None:
        """From now on velocities are added to residuals. Raises SlipstreamError where it is late.

        With sparse buckets it communicates; all ranks call it alike.
        """
        if self._step > 0 or self.momentum is not None:
            raise SlipstreamError(
                "Momentum correction begins before the first backward, once: call "
                "correct_momentum() right after the GradientSync was made."
            )
        self.momentum = momentum
        self._rebuild(self.reducer.plan)

    def _rescale(self, scale: float) -> None:
        """What is owed is of gradients with the old loss scale, and is added to some of the new."""
        if scale != self.scale:
            if isinstance(self.reducer, Reducer):
                self.reducer.sparse.scale(scale / self.scale)
            for piece in self._parked:
                piece.values.mul_(scale / self.scale)
            self.scale = scale

    def take_part_without_gradient(self) -> None:
        """A round in which this rank has no backward."""
        self.wait()
        self._replan_if_due()
        self._begin()
        self._backward_ended()

    @contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Tells of an error inside which ranks are missing; then nothing can be averaged more."""
        if self.broken is not None:
            raise self.broken
        try:
            yield
        except Exception as error:
            doing = f"{what} of step {self._step}"
            raise self._break(self._means.peers.failure(error, doing)) from error

    def end_round(self, exposed_seconds: float) -> None:
        """All averages of the last backward are where they belong, or were dropped."""
        reducer = self.reducer
        self.exposed_seconds = exposed_seconds
        self._finished = [Travel.of(buffer) for buffer in reducer.buffers if buffer.ticket]
        gathers = reducer.gathers if isinstance(reducer, PipelinedReducer) else []
        self._gathered = [Travel.of(bucket) for bucket in gathers if bucket.ticket]
        if isinstance(reducer, Reducer) and reducer.sparse:
            reducer.sparse.add_to(self.sparse_totals)
        self._keeper.round_finished(self._means.params, self._means.peers)

    def before_accumulate(self, name: str) -> None:
        """Nothing may be added to a bucket that is in flight, or to a gradient that is used up."""
        if self.broken is None:
            if self.reducer.in_flight and not self._open:
                self._clear_the_way()
            self.reducer.before(name, self._means.timeout_seconds)

    def after_accumulate(self, name: str) -> None:
        """Takes the gradient that autograd has just added to this parameter's."""
        try:
            if self.broken is not None:
                raise self.broken
            task = current_task()
            if task != self._last_task:
                self._enter(task)
            if self.enabled:
                if self._keeper.learning:
                    self._keeper.saw(name)
                self.reducer.ready(name)
            else:
                self.reducer.keep(name)
        except Exception as error:
            self._fail(error)
            raise

    def _enter(self, task: int) -> None:
        """The first hook that fires in a graph task."""
        if self._open and self._watch.is_stale(task):
            self._drop_interrupted_round()
        is_first = not self._open
        if is_first:
            self._replan_if_due()
        if self.enabled:
            self._watch.enter(task)
            if is_first:
                self._begin()
            self.reducer.hold |= self._watch.nested
        self._last_task = task
        # in a second task of a round, and in the first one when it goes on, a gradient may be one
        # of a parameter that has had one, and is looked at before it is accumulated
        self.task = task if is_first and isinstance(self.reducer, Reducer) else -1

    def _begin(self) -> None:
        if self.flush is None:
            refuse_undeferred(self.reducer.plan)
        if self.scale_of is not None:
            self._rescale(self.scale_of())
        self._step += 1
        self.reducer.begin()
        if isinstance(self.reducer, Reducer):
            self.reducer.sparse.begin(self._keeper.step, self.scale)
        self._open = True

    def _backward_ended(self) -> None:
        self._open = False
        self._last_task = -1
        try:
            self.reducer.seal()
        except Exception as error:
            self._fail(error)
            raise
        if not self.wait_for_update:
            self._finish()

    def _clear_the_way(self) -> None:
        """Before a backward nothing of the one before it may be on its way."""
        if self.flush is not None:
            self.flush()
        if not self.in_flight:
            return
        if isinstance(self.reducer, PipelinedReducer):
            raise SlipstreamError(
                "The last backward's averages were neither used nor dropped: before the next "
                "backward call optimizer.step(), or optimizer.zero_grad() of the deferred "
                "optimizer; accumulate in sync.no_sync(), or call sync.wait() to add to averages."
            )
        self._finish()

    def _finish(self) -> None:
        try:
            exposed_seconds = self.reducer.finish(self._means.timeout_seconds)
        except Exception as error:
            index = self.reducer.first_failed()
            doing = f"averaging bucket {index} of step {self._step}"
            raise self._break(self._means.peers.failure(error, doing)) from error
        self.end_round(exposed_seconds)

    def _replan_if_due(self) -> None:
        means, reducer = self._means, self.reducer
        plan = self._keeper.due(means.params, means.peers, self._step)
        if plan is not None:
            kept = {name for name, slot in reducer.slots.items() if slot.kept}
            self._refuse_half_averaged(kept - {g for b in plan.reduce for g in b.gradients})
            self._rebuild(plan)
            for name in kept & set(self.reducer.slots):
                self.reducer.slots[name].kept = True

    def _rebuild(self, plan: Plan) -> None:
        """Goes over to other buckets. Nothing may be in flight."""
        owed = self.owed()
        self.reducer.release()  # before the new buckets, or both exist at once
        self.reducer = self._build(plan)
        self.owe(owed)

    def _refuse_half_averaged(self, frozen: set[str]) -> None:
        """What was accumulated for a parameter that is frozen now would never be averaged."""
        for name in sorted(frozen):
            grad = self._means.params[name].grad
            if grad is not None and bool(grad.any()):  # cleared ones are no matter
                raise SlipstreamError(
                    f"Parameter {name!r} was frozen while gradient that was accumulated under "
                    "no_sync() was still to be averaged, so ranks would step with their own. "
                    "Freeze between two steps, or clear its gradient with zero_grad() before."
                )

    def _drop_interrupted_round(self) -> None:
        """A backward ended in an error before this one: harmless only if nothing had gone out."""
        if self.reducer.started:
            raise self._break(
                SlipstreamError(
                    f"The backward of step {self._step} ended in an error after some of its "
                    "gradients had been averaged, so ranks may differ. Make a new GradientSync, "
                    "which starts from rank 0's parameters."
                )
            )
        self._watch.forget()
        self._open = False
        self.reducer.in_flight = False

    def _build(self, plan: Plan) -> Reducer | PipelinedReducer:
        means = self._means
        if plan.gather is not None:
            return PipelinedReducer(plan, means)
        return Reducer(
            plan,
            means.params,
            means.strides,
            means.collectives,
            means.channel,
            rank=means.peers.rank,
            world_size=means.peers.world_size,
            check_finite=means.check_finite,
            momentum=self.momentum,
        )

    def _break(self, error: SlipstreamError) -> SlipstreamError:
        """Nothing can be averaged any more; later calls raise the same error."""
        self.broken = error
        return error

    def _fail(self, error: Exception) -> None:
        """An error of this rank's own: the others learn it instead of waiting for the limit."""
        if self.broken is None:
            own = error if isinstance(error, SlipstreamError) else SlipstreamError(str(error))
            self._break(own)
            self._means.peers.post_failure(str(error), f"running step {self._step}", cause=True)
