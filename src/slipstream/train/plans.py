"""The engine of a run with the plans that its recipe asks for, or that an earlier part of it had.

A run folder keeps two files: `plan.json`, the plan in force, and `plans.json`, every plan with the
step from which on it was in force. Checkpoints hold the latter, too. A resumed run follows that
record: plans at their steps, those after its checkpoint included, so that it goes on bit for bit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from slipstream.auto import GradientSync
from slipstream.cluster import Cluster
from slipstream.comm.chosen import check
from slipstream.costs import ClusterSpec, Costs
from slipstream.durable import write_text_atomic
from slipstream.errors import PlanError, RecipeError
from slipstream.plan import PlanHistory
from slipstream.plan.sparsity import Sparsity
from slipstream.train.checkpoint import LoadedCheckpoint
from slipstream.train.distributed import Job
from slipstream.train.recipe import Recipe, parse_recipe
from slipstream.train.recipe.settings import SyncSettings
from slipstream.train.record.outstanding import Outstanding

PLAN_FILE, PLANS_FILE = "plan.json", "plans.json"
_LIMITS = ("first_bytes", "cap_bytes", "last_bytes")
_PROBE_SHARE, _LEAST_PROBE_STEPS = 0.02, 10
"""How much longer than without it a run may take for measuring the cluster by one way, but as long
as some steps at least: in less no probe reaches buckets of the whole model where the network is
slow. For several ways see `AutoSettings.probe_budget_seconds`."""
_DECISIVE = ("planner", "collectives", "allow", "plan_file", "cluster_file", *_LIMITS)


def build_sync(
    recipe: Recipe,
    job: Job,
    model: nn.Module,
    *,
    num_steps: int,
    loaded: LoadedCheckpoint | None,
    run_folder: Path,
) -> GradientSync:
    """The engine of a run of `num_steps`, new or resumed from `loaded`; all ranks call it.

    Raises what the engine raises, PlanError and CostError for files that cannot be used, and
    RecipeError for collectives that do not work on the job's cluster.
    """
    settings = recipe.sync
    epoch = loaded.position.epoch if loaded else 0
    recorded = _recorded(recipe, job, loaded, run_folder) if loaded else None
    plan: str | Path | PlanHistory = settings.planner
    options: dict[str, Any] = {}
    if settings.plan_file:
        plan = recorded or Path(settings.plan_file)
    elif settings.planner == "fixed":
        options = {limit: getattr(settings, limit) for limit in _LIMITS}
    elif settings.measures:
        options = {"probe_steps": max(_LEAST_PROBE_STEPS, round(_PROBE_SHARE * num_steps))}
        if settings.cluster_file:
            options["costs"] = ClusterSpec.load(Path(settings.cluster_file))
        options |= _allowed(settings, job.cluster, options.get("costs"))
    if settings.may_be_sparse and recipe.sparse.density:
        options["sparsity"] = _sparsity(recipe, epoch, model, job.cluster)
    return GradientSync(
        model,
        plan=plan,
        plan_options=options,
        group=job.gradient_group,
        store=job.store,
        timeout_seconds=settings.timeout_seconds,
        check_finite=True,
        cluster=job.cluster,
        model_name=recipe.model.name,
        recorded=recorded,
        first_step=loaded.step if loaded else 0,
    )


def _allowed(settings: SyncSettings, cluster: Cluster, spec: ClusterSpec | None) -> dict[str, Any]:
    """What buckets may use on the cluster; of a file with measured costs, "all" means those.

    Raises RecipeError for a collective that does not work there.
    """
    allowed: dict[str, Any] = {"allow": settings.allow} if settings.may_round else {}
    if not settings.chooses:
        return allowed
    works, named = [], settings.named_collectives
    if "all" in settings.collectives and spec is not None and spec.costs:
        named = Costs.of(spec).collectives
    for name in named:
        try:
            check(name, "float32", cluster)
        except PlanError as error:
            if name in settings.collectives:
                raise RecipeError(f"sync.collectives holds {name}. {error}") from error
        else:
            works.append(name)
    return {**allowed, "collectives": works}


def _sparsity(recipe: Recipe, epoch: int, model: nn.Module, cluster: Cluster) -> Sparsity | None:
    """What may be sent sparsely in an epoch.

    Raises RecipeError for a collective that does not work on the cluster, and for a pattern that no
    parameter matches.
    """
    found = recipe.sparse.in_epoch(epoch)
    if found is not None:
        try:
            check(found.collective, found.wire, cluster)
        except PlanError as error:
            raise RecipeError(f"sparse.collective: {error}") from error
        names = [name for name, _ in model.named_parameters()]
        for pattern in found.unmatched(names):
            raise RecipeError(
                f"sparse.dense holds {pattern!r}, which no parameter of {recipe.model.name} "
                f"matches; they are called {', '.join(names[:3])}, ..."
            )
    return found


def gathers(recipe: Recipe, sync: GradientSync) -> bool:
    """Whether the run may come to a plan that puts updates off into the next forward."""
    planned = any(plan.gather is not None for _, plan in sync.plans)
    return planned or (recipe.sync.measures and recipe.sync.planner == "pipelined")


def _recorded(
    recipe: Recipe, job: Job, loaded: LoadedCheckpoint, run_folder: Path
) -> PlanHistory | None:
    """The plans to follow after a checkpoint; None where the recipe asks for others since then.

    Those of the run folder, which may reach further, where they are the same up to the checkpoint.
    """
    if loaded.plan is None or _asks_for_others(recipe, loaded):
        return None
    saved = PlanHistory.from_json(loaded.plan, f"the plan in {loaded.path}")
    found: list[str] = []

    def read() -> None:
        path = run_folder / PLANS_FILE
        if os.path.lexists(path):
            history = _history_in(path, loaded.path)
            if history.agrees_with(saved, loaded.step):
                found.append(history.to_json())

    job.on_rank_zero(read, f"reading {PLANS_FILE}")
    text = job.peers.gather(found[0] if found else None, f"reading {PLANS_FILE}")[0]
    return saved if text is None else PlanHistory.from_json(text)


def _history_in(path: Path, checkpoint: Path) -> PlanHistory:
    """The history in a run folder. Raises PlanError that says where else to find one."""
    try:
        return PlanHistory.load(path)
    except PlanError as error:
        raise PlanError(
            f"{str(error).rstrip('.')}. Remove that file: {checkpoint} holds the plans up to its"
            " step, too, and the resumed run follows those."
        ) from error


def _asks_for_others(recipe: Recipe, loaded: LoadedCheckpoint) -> bool:
    """Whether the settings that decide about plans were changed since the checkpoint."""
    if loaded.recipe is None:
        return False
    then = parse_recipe(loaded.recipe, f"the recipe in {loaded.path}")
    return then.sparse != recipe.sparse or any(
        getattr(then.sync, name) != getattr(recipe.sync, name) for name in _DECISIVE
    )


class PlanFiles:
    """Keeps `plan.json` and `plans.json` of a run folder at what `sync` says.

    note: called with one sentence when the disk begins to refuse them.
    """

    def __init__(self, sync: GradientSync, run_folder: Path, note: Callable[[str], None]) -> None:
        self._sync = sync
        self._run_folder = run_folder
        self._written: PlanHistory | None = None
        self._outstanding = Outstanding(note)

    def write(self) -> str | None:
        """Writes both files where something changed; a sentence about it where the disk refuses.

        What was refused is written by a later call.
        """
        history = self._sync.history
        if history != self._written:
            texts = {PLANS_FILE: history.to_json(), PLAN_FILE: self._sync.plan.to_json()}
            for name, text in texts.items():
                try:
                    write_text_atomic(self._run_folder / name, text)
                except OSError as error:
                    self._outstanding.failed(self._run_folder / name, error)
                    return self._outstanding.failure
            self._written = history
            self._outstanding.succeeded()
        return None


class _Lines(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())


@contextmanager
def noting(note: Callable[[str], None], rank: int) -> Iterator[None]:
    """Meanwhile what the engine logs on rank 0 is noted, one line each."""
    if rank != 0:
        yield
        return
    logger, lines = logging.getLogger("slipstream"), _Lines(note)
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(lines)
