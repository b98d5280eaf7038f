"""The part of `GradientSync` that shows plans and changes them."""

from __future__ import annotations

from slipstream.comm.peers import Peers
from slipstream.errors import RanksDiffer, SlipstreamError
from slipstream.plan import Plan, PlanHistory
from slipstream.plan.sparsity import Sparsity, resparsified
from slipstream.sync.deferred import Updates
from slipstream.sync.planning import PlanKeeper, refuse_undeferred
from slipstream.sync.rounds import Rounds
from slipstream.sync.wrapping import Params


class Plans:
    """The plans of an engine, past, present and future."""

    _keeper: PlanKeeper
    _params: Params
    _peers: Peers
    _rounds: Rounds
    _updates: Updates | None

    @property
    def plan(self) -> Plan:
        """The plan of the next backward. A named planner's changes once, after the first step."""
        return self._with_wait(self._rounds.plan)

    @property
    def history(self) -> PlanHistory:
        """Every plan with the step from which on it was in force; steps are synchronised backwards.

        The last ones may lie ahead: that of the next backward, and what `recorded` holds.
        """
        history = self._keeper.history
        return PlanHistory(
            plans=tuple(
                entry.model_copy(update={"plan": self._with_wait(entry.plan)})
                for entry in history.plans
            )
        )

    @property
    def plans(self) -> list[tuple[int, Plan]]:
        """The steps and plans of `history`."""
        return [(entry.step, entry.plan) for entry in self.history.plans]

    def use_plan(self, plan: Plan, reason: str = "") -> None:
        """The next backward starts with this plan. All ranks call it alike, between two steps.

        Waits for averages in flight. reason: for `history`. Raises SlipstreamError inside a
        backward and while gradient is accumulated that no backward has averaged, RanksDiffer when
        ranks have different plans, PlanError for one that does not fit.
        """
        if self._updates is None:
            refuse_undeferred(plan)
        self._rounds.wait()
        reducer = self._rounds.reducer
        if reducer.in_flight or any(slot.kept for slot in reducer.slots.values()):
            raise SlipstreamError(
                "A plan can change between two steps only: let the backward end, and average what "
                "was accumulated under no_sync(), before use_plan()."
            )
        prints = self._peers.gather(plan.fingerprint(), "agreeing on a new plan")
        for rank, theirs in enumerate(prints):
            if theirs != prints[0]:
                raise RanksDiffer(
                    f"Ranks differ: use_plan was given the plan {prints[0][:16]} on rank 0 and "
                    f"{theirs[:16]} on rank {rank}. Give every rank the same plan."
                )
        self._keeper.use(plan, self._params, reason)

    def set_sparsity(self, sparsity: Sparsity | None, reason: str = "") -> None:
        """Changes what a plan_option `sparsity` has permitted; all ranks call it alike.

        From the next backward on buckets that are sparse send another share of their elements, or
        with None all, and what they have kept. The same restrictions and errors as `use_plan`.
        """
        self._keeper.sparsity = sparsity
        self._resparsify(sparsity, reason)

    def _resparsify(self, sparsity: Sparsity | None, reason: str) -> None:
        plan = self.plan
        changed = resparsified(plan, sparsity)
        if not changed.travels_like(plan):
            self.use_plan(changed, reason)

    def _with_wait(self, plan: Plan) -> Plan:
        if plan.gather is not None:
            return plan
        wait = "update" if self._rounds.wait_for_update else "backward"
        return plan.model_copy(update={"wait": wait})
