"""Which plan is in force: the first one, the learnt order, and changes of trainability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.cluster import Cluster
from slipstream.comm.peers import Peers
from slipstream.errors import PlanError, RanksDiffer
from slipstream.plan import Bucket, Gradient, Plan, plan_buckets
from slipstream.sync.wrapping import Params, first_trainability_difference, gradients_in_reverse


class PlanKeeper:
    """Makes plans for the trainable parameters of the moment, the same on every rank.

    plan: a planner's name or a Plan; options: of the named planner; cluster: goes into the record.
    """

    def __init__(self, plan: str | Plan, options: Mapping[str, Any], cluster: Cluster) -> None:
        self._plan = plan
        self._options = dict(options)
        self._cluster = cluster
        self._trainable: list[str] = []
        self._learning = isinstance(plan, str)
        self._order: list[str] = []
        self._next: Plan | None = None

    @property
    def next_plan(self) -> Plan | None:
        """The plan that the next backward will start with, where it is another one."""
        return self._next

    def describe(self) -> str:
        """The setting in words, equal on ranks whose plans will be equal."""
        if isinstance(self._plan, Plan):
            return f"a plan with fingerprint {self._plan.fingerprint()[:16]}"
        return f"planner {self._plan!r} and options {dict(sorted(self._options.items()))}"

    def first_plan(self, params: Params) -> Plan:
        """The plan before anything is known of the ready order. Raises PlanError."""
        gradients = gradients_in_reverse(params)
        self._trainable = [gradient.name for gradient in gradients]
        if isinstance(self._plan, Plan):
            self._plan.check_covers(gradients)
            _check_is_within_reach(self._plan)
            return self._plan
        return self._make(gradients)

    def saw(self, name: str) -> None:
        """A gradient became ready in a synchronised backward."""
        if self._learning:
            self._order.append(name)

    def round_finished(self, params: Params, peers: Peers) -> None:
        """All ranks have finished a round: after the first they agree on the order they saw.

        Here, and not when the next backward begins, so that a checkpoint in between holds the plan
        with which training goes on.
        """
        if not self._learning:
            return
        everyone = peers.gather(list(dict.fromkeys(self._order)), "agreeing on the ready order")
        self._learning, self._order = False, []
        by_name = {gradient.name: gradient for gradient in gradients_in_reverse(params)}
        order = [name for name in everyone[0] if name in by_name]
        order += [name for name in by_name if name not in set(order)]
        self._next = self._make([by_name[name] for name in order])

    def due(self, params: Params, peers: Peers, step: int) -> Plan | None:
        """Called when a backward begins: the new plan if one is due, else None.

        Raises RanksDiffer when only some ranks changed which parameters are trainable, and
        PlanError when a given Plan lacks a parameter that was unfrozen.
        """
        trainable = [name for name, param in params.items() if param.requires_grad][::-1]
        if trainable != self._trainable:
            return self._after_switch(trainable, params, peers, step)
        plan, self._next = self._next, None
        return plan

    def _after_switch(self, trainable: list[str], params: Params, peers: Peers, step: int) -> Plan:
        """Plans for another set of trainable parameters, once all ranks have said the same set."""
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
        self._next = None
        gradients = gradients_in_reverse(params)
        if isinstance(self._plan, Plan):
            plan = _restricted(self._plan, gradients)
            plan.check_covers(gradients)
            return plan
        self._learning, self._order = True, []
        return self._make(gradients)

    def _make(self, gradients: list[Gradient]) -> Plan:
        assert isinstance(self._plan, str)
        shape = self._cluster.ranks_per_node
        update = {
            "nodes": self._cluster.nodes,
            "ranks_per_node": shape[0] if len(set(shape)) == 1 else shape,
        }
        return plan_buckets(self._plan, gradients, **self._options).model_copy(update=update)


def _check_is_within_reach(plan: Plan) -> None:
    """Raises PlanError for what plans can ask for and this engine cannot do."""
    if plan.wait == "forward" or plan.gather is not None:
        raise PlanError(
            f"The plan by {plan.planner!r} lets averages arrive in the next forward, which the "
            "engine cannot do yet; make one with another planner."
        )
    for index, bucket in enumerate(plan.reduce):
        if (bucket.collective, bucket.wire) != ("native", "float32"):
            raise PlanError(
                f"Bucket {index} of the plan travels by {bucket.collective!r} with wire "
                f"{bucket.wire!r}; the engine has 'native' with wire 'float32' only."
            )


def _restricted(plan: Plan, gradients: list[Gradient]) -> Plan:
    """The plan without the gradients that are frozen now, and without buckets left empty."""
    by_name = {gradient.name: gradient for gradient in gradients}
    buckets = []
    for bucket in plan.reduce:
        names = tuple(name for name in bucket.gradients if name in by_name)
        if names:
            size = sum(by_name[name].bytes for name in names)
            buckets.append(
                Bucket(gradients=names, bytes=size, collective=bucket.collective, wire=bucket.wire)
            )
    return plan.model_copy(update={"reduce": tuple(buckets)})
