"""Which plan is in force: the first one, the learnt order, recorded ones, and changes of models."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.cluster import Cluster
from slipstream.comm.chosen import check as check_collective
from slipstream.comm.peers import Peers
from slipstream.errors import PlanError, RanksDiffer
from slipstream.plan import Bucket, Gradient, Plan, PlanHistory, PlannedStep, plan_buckets
from slipstream.plan.sparsity import SPARSE_DTYPES, Sparsity
from slipstream.sync.wrapping import Params, first_trainability_difference, gradients_in_reverse
from slipstream.wires import Density


class PlanKeeper:
    """Makes plans for the trainable parameters of the moment, the same on every rank.

    plan: a planner's name or a Plan; options: of the named planner; cluster, model: go into the
    record. recorded: the plans of an earlier run of this training, which are in force again at
    their steps; then nothing is learnt, until other parameters become trainable. first_step: how
    many rounds the training has behind it.

    sparsity: what may be sent sparsely by plans that a named planner makes from now on; one of the
    options at first. step: rounds that are finished. switches: how often other parameters became
    trainable without a recorded plan for them. on_round: called whenever a round is finished, on
    every rank alike.
    """

    def __init__(
        self,
        plan: str | Plan,
        options: Mapping[str, Any],
        cluster: Cluster,
        *,
        model: str = "",
        recorded: PlanHistory | None = None,
        first_step: int = 0,
    ) -> None:
        self.step = first_step
        self.switches = 0
        self.on_round: Callable[[], None] | None = None
        self._plan = plan
        self._options = dict(options)
        self.sparsity: Sparsity | None = self._options.pop("sparsity", None)
        self._cluster = cluster
        self._model = model
        self._trainable: list[str] = []
        self.learning = isinstance(plan, str) and recorded is None
        self._order: list[str] = []
        self._entries = list(recorded.until(first_step)) if recorded else []
        self._future = deque(recorded.after(first_step) if recorded else ())
        self._next: PlannedStep | None = None

    @property
    def has_future(self) -> bool:
        """Whether a record says with which plans training goes on."""
        return bool(self._future)

    @property
    def next_plan(self) -> Plan | None:
        """The plan that the next backward will start with, where it is another one."""
        upcoming = self._upcoming()
        return upcoming.plan if upcoming else None

    @property
    def history(self) -> PlanHistory:
        """All plans so far, that of the next backward, and what is recorded of later steps."""
        entries = list(self._entries)
        if self._next is not None:
            _put(entries, self._next)
        return PlanHistory(plans=(*entries, *self._future))

    def describe(self) -> str:
        """The setting in words, equal on ranks whose plans will be equal."""
        words = f"planner {self._plan!r} and options {dict(sorted(self._options.items()))}"
        if self.sparsity is not None:
            words += f", sparsely {self.sparsity}"
        if isinstance(self._plan, Plan):
            words = f"a plan with fingerprint {self._plan.fingerprint()[:16]}"
        recorded = [*self._entries, *self._future]
        if recorded:
            steps = [f"{entry.step}: {entry.plan.fingerprint()[:16]}" for entry in recorded]
            words += f", after step {self.step} of a record with {', '.join(steps)}"
        return words

    def first_plan(self, params: Params) -> Plan:
        """The plan before anything is known of the ready order. Raises PlanError."""
        gradients = gradients_in_reverse(params)
        self._trainable = [gradient.name for gradient in gradients]
        if not self._entries:
            plan = self._plan if isinstance(self._plan, Plan) else self._make(gradients)
            self._entries.append(PlannedStep(step=self.step, plan=plan))
        plan = self._entries[-1].plan
        _check_fits(plan, gradients, self._cluster)
        return plan

    def saw(self, name: str) -> None:
        """A gradient became ready in a synchronised backward, in which the order is `learning`."""
        self._order.append(name)

    def round_finished(self, params: Params, peers: Peers) -> None:
        """All ranks have finished a round: after the first they agree on the order they saw.

        Here, and not when the next backward begins, so that a checkpoint in between holds the plan
        with which training goes on.
        """
        self.step += 1
        if self.learning:
            everyone = peers.gather(list(dict.fromkeys(self._order)), "agreeing on the ready order")
            self.learning, self._order = False, []
            by_name = {gradient.name: gradient for gradient in gradients_in_reverse(params)}
            order = [name for name in everyone[0] if name in by_name]
            order += [name for name in by_name if name not in set(order)]
            self._propose(self._make([by_name[name] for name in order]))
        if self.on_round is not None:
            self.on_round()

    def use(self, plan: Plan, params: Params, reason: str = "") -> None:
        """The next backward will start with this plan; what was recorded of later steps is void.

        Raises PlanError for a plan that does not fit.
        """
        _check_fits(plan, gradients_in_reverse(params), self._cluster)
        self.learning, self._order = False, []
        self._future.clear()
        if isinstance(self._plan, Plan):
            self._plan = plan
        self._propose(plan, reason)

    def annotate(self, reason: str, measured_step_seconds: float | None) -> None:
        """Puts on record what was decided about the plan in force, and how long its steps took."""
        update = {"reason": reason, "measured_step_seconds": measured_step_seconds}
        self._entries[-1] = self._entries[-1].model_copy(update=update)

    def due(self, params: Params, peers: Peers, step: int) -> Plan | None:
        """Called when a backward begins: the new plan if one is due, else None.

        Raises RanksDiffer when only some ranks changed which parameters are trainable, and
        PlanError when a given Plan lacks a parameter that was unfrozen.
        """
        trainable = [name for name, param in params.items() if param.requires_grad][::-1]
        if trainable != self._trainable:
            self._agree_on_switch(trainable, params, peers, step)
            self._after_switch(params)
        entry = self._upcoming()
        if entry is None:
            return None
        if entry is not self._next:
            self._future.popleft()
            _check_fits(entry.plan, gradients_in_reverse(params), self._cluster)
        self._next = None
        _put(self._entries, entry)
        return entry.plan

    def _upcoming(self) -> PlannedStep | None:
        """The plan of the next backward, where it is not the one in force."""
        if self._next is None and self._future and self._future[0].step <= self.step:
            return self._future[0]
        return self._next

    def _propose(self, plan: Plan, reason: str = "") -> None:
        self._next = PlannedStep(step=self.step, plan=plan, reason=reason)

    def _agree_on_switch(
        self, trainable: list[str], params: Params, peers: Peers, step: int
    ) -> None:
        """Goes on once all ranks have said the same set of trainable parameters."""
        names = list(params)
        answers = peers.gather_by_store(f"trainable/{step}", trainable)
        for rank in range(peers.world_size):
            theirs = answers.get(rank, self._trainable)
            name = first_trainability_difference(trainable, theirs, names)
            if name is not None:
                here = "trainable" if name in trainable else "frozen"
                raise RanksDiffer(
                    f"Parameter {name!r} is {here} on rank {peers.rank} and not so on rank {rank}, "
                    f"since step {step}. Freeze and unfreeze on all ranks between the same steps."
                )
        self._trainable = trainable

    def _after_switch(self, params: Params) -> None:
        """Plans for another set of trainable parameters: as recorded, or anew."""
        gradients = gradients_in_reverse(params)
        upcoming = self._upcoming()
        if upcoming is not None and _covers(upcoming.plan, gradients):
            return
        self._future.clear()
        if isinstance(self._plan, Plan):
            plan = _restricted(self._plan, gradients)
            plan.check_covers(gradients)
        else:
            self.switches += 1
            self.learning, self._order = True, []
            plan = self._make(gradients)
        self._propose(plan)

    def _make(self, gradients: list[Gradient]) -> Plan:
        assert isinstance(self._plan, str)
        shape = self._cluster.ranks_per_node
        update = {
            "model": self._model,
            "nodes": self._cluster.nodes,
            "ranks_per_node": shape[0] if len(set(shape)) == 1 else shape,
        }
        plan = plan_buckets(self._plan, gradients, sparsity=self.sparsity, **self._options)
        return plan.model_copy(update=update)


def _put(entries: list[PlannedStep], entry: PlannedStep) -> None:
    """Appends the entry, in place of one of the same step, which no backward began with."""
    if entries and entries[-1].step == entry.step:
        entries.pop()
    entries.append(entry)


def _covers(plan: Plan, gradients: list[Gradient]) -> bool:
    try:
        plan.check_covers(gradients)
    except PlanError:
        return False
    return True


def _check_fits(plan: Plan, gradients: list[Gradient], cluster: Cluster) -> None:
    plan.check_covers(gradients)
    _check_is_within_reach(plan, cluster)
    dtypes = {gradient.name: gradient.dtype for gradient in gradients}
    for index, bucket in enumerate(plan.reduce):
        dtype = dtypes[bucket.gradients[0]]
        if isinstance(bucket.wire, Density) and dtype not in SPARSE_DTYPES:
            raise PlanError(
                f"Bucket {index} of the plan holds {dtype} gradients, and {bucket.collective} "
                f"sends {', '.join(SPARSE_DTYPES)}; plan a dense collective for it."
            )


def _check_is_within_reach(plan: Plan, cluster: Cluster) -> None:
    """Raises PlanError for what plans can ask for and this engine cannot do."""
    if plan.wait == "forward" and plan.gather is None:
        raise PlanError(
            f"The plan by {plan.planner!r} has no gather buckets and lets averages arrive in the "
            "next forward, which the engine cannot do yet; make one with another planner."
        )
    for index, bucket in enumerate((*plan.reduce, *(plan.gather or ()))):
        check_collective(bucket.collective, bucket.wire, cluster)
        if plan.gather is not None and (bucket.collective, bucket.wire) != ("native", "float32"):
            raise PlanError(
                f"Bucket {index} of the plan travels by {bucket.collective!r} with wire "
                f"{bucket.wire!r}; plans that gather have 'native' with wire 'float32' only."
            )


def refuse_undeferred(plan: Plan) -> None:
    """Raises PlanError for a plan that needs a deferred optimizer; called where there is none."""
    if plan.gather is not None:
        raise PlanError(
            f"The plan by {plan.planner!r} updates parameters in the next forward, which takes a "
            "deferred optimizer: call optimizer = sync.deferred(optimizer) before the backward, or "
            "use another planner."
        )


def _restricted(plan: Plan, gradients: list[Gradient]) -> Plan:
    """The plan without the gradients that are frozen now, and without buckets left empty."""
    sizes = {gradient.name: gradient.bytes for gradient in gradients}
    gather = None if plan.gather is None else _kept(plan.gather, sizes)
    return plan.model_copy(update={"reduce": _kept(plan.reduce, sizes), "gather": gather})


def _kept(buckets: Sequence[Bucket], sizes: Mapping[str, int]) -> tuple[Bucket, ...]:
    kept = []
    for bucket in buckets:
        names = tuple(name for name in bucket.gradients if name in sizes)
        if names:
            size = sum(sizes[name] for name in names)
            kept.append(bucket.model_copy(update={"gradients": names, "bytes": size}))
    return tuple(kept)
