"""`slipstream.GradientSync`: the engine, which also takes plan files and `plan="auto"`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from slipstream import sync
from slipstream.auto.pilot import Pilot, Surroundings
from slipstream.auto.settings import STEP_PLANNERS, AutoSettings
from slipstream.cluster import Cluster
from slipstream.comm.torch_comm import backend_of
from slipstream.errors import PlanError
from slipstream.plan import PLANNER_NAMES, PLANNERS, Plan, PlanHistory
from slipstream.plan.sparsity import Sparsity
from slipstream.sync.wrapping import device_of, gradients_in_reverse
from slipstream.trace import parameters_sha256

FIRST_PLANNER = "ddp"
"""Who plans until auto has measured something."""


class GradientSync(sync.GradientSync):
    """`slipstream.sync.GradientSync` with three more ways to say `plan`.

    "auto": the engine begins as `ddp`. After some steps it profiles itself, measures the cluster's
    collectives for a few seconds on its own group, plans, and changes its buckets between two
    steps where that gains more than 3 % and more than the measurements spread; where steps then
    turn out slower, it goes back. It looks once more after 1,000 steps, and begins again when other
    parameters become trainable. What it did is one line of the logger "slipstream" on rank 0, and
    stands in `history`. Once done it costs nothing.

        plan_options: planner ("optimal", or any other name) and its own options; collectives
        (["native"]) and allow (["float32"]), the wire formats: what may carry buckets, the fastest
        for each; costs (Costs or ClusterSpec) instead of a probe; probe_seconds (3.0) and
        probe_steps (30), of which the shorter time counts, a third more of it for each further
        collective with a wire format, up to four times; steps (8) that are profiled and timed;
        again_after_steps (1,000).

    "optimal", "mgwfbp", "four_minutes", "pipelined": auto with that planner; the last needs
    `deferred`, and it and the one before have collectives of their own.

    A path, or a text that ends with ".json": a plan file is followed, and of a plans file each plan
    from its step on.

    With `recorded` that holds a decision of auto, that is followed and nothing is measured, until
    other parameters become trainable. In a world of one rank there is nothing to gain.

    Raises, beside what the engine raises, PlanError for a file that is damaged or was made for
    another model or cluster, and for options that auto does not have; CostError for costs of
    another cluster.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: str | os.PathLike[str] | Plan | PlanHistory = FIRST_PLANNER,
        plan_options: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
        timeout_seconds: float = 600.0,
        check_finite: bool = False,
        cluster: Cluster | None = None,
        model_name: str | None = None,
        recorded: PlanHistory | None = None,
        first_step: int = 0,
        ignore: Collection[str] = (),
    ) -> None:
        self._auto: AutoSettings | None = None
        self._pilot: Pilot | None = None
        self._model_name = model_name or type(getattr(model, "_orig_mod", model)).__name__
        self._file: PlanHistory | None = None
        if isinstance(plan, os.PathLike) or (isinstance(plan, str) and plan.endswith(".json")):
            plan = self._file = PlanHistory.load(Path(plan))
        if isinstance(plan, PlanHistory):
            recorded = plan
            plan = plan.until(first_step)[-1].plan
        elif plan == "auto" or plan in STEP_PLANNERS:
            self._auto = AutoSettings.of(str(plan), plan_options or {})
            plan, plan_options = FIRST_PLANNER, None
        if not isinstance(plan, Plan) and plan not in PLANNERS:
            known = ", ".join(("auto", *PLANNER_NAMES))
            raise PlanError(
                f"plan is {plan!r}; it is a Plan, a file of one (a path, or a text that ends with "
                f".json), or a planner: {known}."
            )
        super().__init__(
            model,
            plan=plan,
            plan_options=plan_options,
            group=group,
            store=store,
            timeout_seconds=timeout_seconds,
            check_finite=check_finite,
            cluster=cluster,
            model_name=self._model_name,
            recorded=recorded,
            first_step=first_step,
            ignore=ignore,
        )
        if self._auto is not None and self._group is not None:
            is_settled = any(entry.reason for entry in recorded.plans) if recorded else False
            self._pilot = self._piloted(model, self._auto, store, is_settled)

    def close(self) -> None:
        """Removes every hook and ends the channel; gradients stay. Safe to call twice."""
        self._keeper.on_round = None
        if self._pilot is not None:
            self._pilot.close()
        super().close()

    def set_sparsity(self, sparsity: Sparsity | None, reason: str = "") -> None:
        """As that of `slipstream.sync.GradientSync`; auto then measures and plans anew."""
        if self._auto is None:
            super().set_sparsity(sparsity, reason)
            return
        self._resparsify(sparsity, reason)
        if sparsity != self._auto.sparsity:
            self._auto = self._auto.permitting(sparsity)
            if self._pilot is not None and not self._keeper.has_future:
                self._pilot.restart(self._auto)

    def _settings(self) -> list[Any]:
        if self._file is not None:
            digest = parameters_sha256(gradients_in_reverse(self._params))
            first = self._file.until(self._keeper.step)[-1]
            first.plan.check_made_for(self._model_name, digest, self._cluster)
        if self._auto is not None:
            device = device_of(self._params)
            backend = backend_of(self._group, device) if self._group else "gloo"
            self._auto = self._auto.on(self._cluster, backend, device.type)
        return [*super()._settings(), self._auto.describe() if self._auto else "no auto"]

    def _piloted(
        self, model: nn.Module, settings: AutoSettings, store: Store | None, is_settled: bool
    ) -> Pilot:
        assert self._group is not None
        around = Surroundings(
            keeper=self._keeper,
            model=weakref.ref(model),
            model_name=self._model_name,
            peers=self._peers,
            group=self._group,
            store=store,
            cluster=self._cluster,
            device=device_of(self._params),
            timeout_seconds=self._timeout_seconds,
        )
        pilot = Pilot(self, around, settings, is_settled=is_settled)
        self._keeper.on_round = pilot.round_finished
        return pilot
