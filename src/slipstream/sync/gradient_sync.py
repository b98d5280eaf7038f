"""`GradientSync`: makes `p.grad` the average over ranks, beside anyone's training loop."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from slipstream.cluster import Cluster
from slipstream.comm import Alone, Collective, Native
from slipstream.comm.peers import Peers
from slipstream.comm.torch_comm import destroy_group, own_group
from slipstream.errors import SlipstreamError
from slipstream.plan import Plan
from slipstream.sync.backward_watch import BackwardWatch, current_task
from slipstream.sync.buffers import Strides
from slipstream.sync.channel import Finished, channel_for
from slipstream.sync.hooks import register_hooks
from slipstream.sync.nonfinite import find_nonfinite
from slipstream.sync.planning import PlanKeeper
from slipstream.sync.reducer import Reducer
from slipstream.sync.report import BucketTimes, NonFinite, StepTimeline
from slipstream.sync.scaler_guard import refuse_early_unscale
from slipstream.sync.uneven import scale_for_sums, uneven_windows
from slipstream.sync.wrapping import agree_on_model, collect_parameters, device_of

Batch = TypeVar("Batch")


class GradientSync:
    """Averages a replicated model's gradients over ranks while backward goes on.

    After `loss.backward()` every `p.grad` is the mean over ranks of the ranks' gradients, a rank
    that did not use a parameter counting as zero; a parameter that no rank used keeps the gradient
    that it had. On construction rank 0's parameters and buffers overwrite those of the others.

        sync = GradientSync(model)
        loss.backward()
        optimizer.step()

    Arguments, the same on every rank:
      model: any module whose parameters are replicated and live on one device. Its trainable
        parameters get hooks; nothing else of it is touched, and `close` removes them.
      plan: a planner's name (`wfbp`, `single`, `fixed`, `ddp`) or a Plan that covers exactly the
        trainable parameters. A named planner first goes by the reverse order of registration, and
        after one step by the order in which gradients became ready on rank 0.
      plan_options: of the named planner, such as {"cap_bytes": 2**20}.
      group: a process group that nothing else uses while gradients are in flight; None makes one
        over all ranks (a world of one rank where torch.distributed is not initialised).
      store: where failures are posted; None takes the one under the group.
      timeout_seconds: limit of every wait. A passed group keeps its own limit for collectives.
      check_finite: lets `nonfinite` tell where infinite or NaN gradients began (one more read of
        every gradient).
      cluster: the ranks' nodes, for the plan's record; None means one node.
      ignore: names of parameters and buffers that stay the rank's own.

    Raises RanksDiffer on every rank when models or settings differ, UnsupportedModel for sharded,
    lazy or multi-device models, PlanError for a plan that does not fit, RankFailure when a rank
    does not come.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: str | Plan = "ddp",
        plan_options: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
        timeout_seconds: float = 600.0,
        check_finite: bool = False,
        cluster: Cluster | None = None,
        ignore: Collection[str] = (),
    ) -> None:
        self._model = model
        self._ignore = frozenset(ignore)
        self._params = collect_parameters(model, self._ignore)
        device = device_of(self._params)
        self._owns_group = group is None and dist.is_initialized()
        self._group = own_group(timeout_seconds) if self._owns_group else group
        self._timeout_seconds = timeout_seconds
        self._check_finite = check_finite
        self._peers = Peers(self._group, store, timeout_seconds, device)
        self._collective: Collective = Native(self._group) if self._group is not None else Alone()
        self._channel = channel_for(device, self.world_size)
        self._watch = BackwardWatch(self._backward_ended)
        self._broken: SlipstreamError | None = None
        self._closed = False
        self._enabled = True
        self._round_open = False
        self._last_task = -1
        self._step = 0
        self._wait_for_update = False
        self._finished: list[tuple[int, float, Finished]] = []
        self._exposed_seconds = 0.0
        self._handles: list[Any] = []
        keeper = PlanKeeper(plan, plan_options or {}, cluster or Cluster((self.world_size,)))
        settings = [keeper.describe(), f"check_finite={check_finite}", sorted(self._ignore)]
        self._strides: dict[str, Strides] = agree_on_model(self._params, settings, self._peers)
        self._keeper = keeper
        self._broadcast_model()
        self._reducer = self._build(keeper.first_plan(self._params))
        self._handles += register_hooks(self._params, self)

    # -- what the user sees ---------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._peers.rank

    @property
    def world_size(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return self._peers.world_size

    @property
    def plan(self) -> Plan:
        """The plan in force. A named planner's changes once, after the first step."""
        wait = "update" if self._wait_for_update else "backward"
        return self._reducer.plan.model_copy(update={"wait": wait})

    @property
    def timeline(self) -> StepTimeline:
        """When the buckets of the last finished round travelled. On a GPU reading it waits."""
        times = (
            BucketTimes(index, size, ready, ticket.start_seconds, ticket.end_seconds)
            for index, (size, ready, ticket) in enumerate(self._finished)
        )
        return StepTimeline(tuple(times), self._exposed_seconds)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate locally; the next one outside averages all of it."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Waits for the averages in `optimizer.step()` instead of in backward (wait="update").

        Between the two `p.grad` must not be touched, except after `wait()`, or through
        `clip_grad_norm_` and `unscale_`, which wait. Call it on every rank alike.
        """
        self._wait_for_update = True
        self_ref = weakref.ref(self)

        def before_step(*_: object) -> None:
            sync = self_ref()
            if sync is not None:
                sync._before_step()

        self._handles.append(optimizer.register_step_pre_hook(before_step))

    def wait(self) -> None:
        """Returns when `p.grad` holds the averages of the last backward. Raises RankFailure."""
        self._check_usable()
        if self._reducer.in_flight and not self._round_open:
            self._finish()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Waits, then scales the averages so that their total norm is at most `max_norm`.

        Mutates `p.grad`; returns the norm before (0-d), which is the same on all ranks.
        """
        self.wait()
        params = [param for param in self._params.values() if param.grad is not None]
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Waits, then `scaler.unscale_(optimizer)`: all ranks see the same infinities."""
        self.wait()
        scaler.unscale_(optimizer)

    def nonfinite(self) -> NonFinite | None:
        """Where infinite or NaN gradients of the last round began, or None; the same on all ranks.

        Waits. Needs check_finite=True. Communicates only when there are some.
        """
        if not self._check_finite:
            raise SlipstreamError("nonfinite() needs GradientSync(..., check_finite=True).")
        self.wait()
        return find_nonfinite(self._reducer.buffers, self._peers)

    def uneven(
        self, batches: Iterable[Batch], *, mode: str = "join", window: int = 1
    ) -> Iterator[tuple[Batch | None, bool]]:
        """This rank's batches, on ranks that may have unequal numbers of them.

            for batch, last in sync.uneven(loader, window=2):
                if batch is not None:
                    loss_of(model(batch)).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()

        window: batches that are accumulated before gradients are averaged; `last` ends one.
        mode: "stop" ends on all ranks before the first window that a rank cannot fill like the
        others; "join" goes on until every rank is out of batches: a rank without any gets None,
        counts as zero in averages (the divisor stays the number of ranks) and steps as they do.
        """
        return uneven_windows(batches, mode, window, self)

    def loss_scale(self, num_samples: int) -> float:
        """Number of ranks / number of samples on all ranks: for unequal numbers of samples.

        By default gradients are the mean over ranks of each rank's own mean. Multiply the *sum* of
        the losses of this rank's `num_samples` samples (of all its micro-batches together) by this
        and the gradient is the mean over all samples. One small agreement between ranks.
        """
        self.wait()
        return scale_for_sums(num_samples, self._peers)

    def sync_buffers(self) -> None:
        """Overwrites the model's buffers with rank 0's, however they were changed.

        The point at which buffers agree: call it on all ranks before evaluation and checkpoints.
        """
        self.wait()
        buffers = [b for name, b in self._model.named_buffers() if name not in self._ignore]
        self._peers.broadcast(buffers, "broadcasting buffers")

    def close(self) -> None:
        """Removes every hook and ends the channel; gradients stay. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._broken is None and self._reducer.in_flight and not self._round_open:
            self._finish()
        self._channel.close(0.0 if self._broken else self._timeout_seconds)
        if self._owns_group and self._group is not None and self._broken is None:
            destroy_group(self._group)

    # -- what autograd calls --------------------------------------------------------------------

    def before_accumulate(self, name: str) -> None:
        """Nothing may be added to a bucket that is in flight."""
        if self._broken is None and self._reducer.in_flight:
            if self._round_open:
                self._reducer.wait_for(self._reducer.slots[name], self._timeout_seconds)
            else:
                self._finish()

    def after_accumulate(self, name: str) -> None:
        """Takes the gradient that autograd has just added to this parameter's."""
        try:
            self._take(name)
        except Exception as error:
            self._fail(error)
            raise

    def _take(self, name: str) -> None:
        self._check_usable()
        task = current_task()
        if task != self._last_task:
            self._enter(task)
        slot = self._reducer.slots[name]
        if self._enabled:
            self._keeper.saw(name)
            self._reducer.ready(slot)
        else:
            self._reducer.keep(slot)

    def _enter(self, task: int) -> None:
        """The first hook that fires in a graph task."""
        if self._round_open and self._watch.is_stale(task):
            self._drop_interrupted_round()
        if not self._round_open:
            self._replan_if_due()
        if self._enabled:
            self._watch.enter(task)
            if not self._round_open:
                self._open_round()
            self._reducer.hold |= self._watch.nested
        self._last_task = task

    def _backward_ended(self) -> None:
        self._round_open = False
        self._last_task = -1
        self._reducer.seal()
        self._keeper.round_sealed()
        if not self._wait_for_update:
            self._finish()

    def _before_step(self) -> None:
        refuse_early_unscale(self._reducer.in_flight)
        self.wait()

    # -- inside ---------------------------------------------------------------------------------

    def _set_enabled(self, enabled: bool) -> None:
        self._enabled = enabled

    def _take_part_without_gradient(self) -> None:
        """A round in which this rank has no backward."""
        self.wait()
        self._replan_if_due()
        self._open_round()
        self._backward_ended()

    def _open_round(self) -> None:
        self._step += 1
        self._reducer.begin()
        self._round_open = True

    def _finish(self) -> None:
        try:
            self._exposed_seconds = self._reducer.finish(self._timeout_seconds)
        except Exception as error:
            index = self._reducer.first_failed()
            doing = f"averaging bucket {index} of step {self._step}"
            raise self._break(self._peers.failure(error, doing)) from error
        self._finished = [
            (buffer.bytes, buffer.ready_seconds, buffer.ticket)
            for buffer in self._reducer.buffers
            if buffer.ticket is not None
        ]

    def _replan_if_due(self) -> None:
        plan = self._keeper.due(self._params, self._reducer.accumulating, self._peers, self._step)
        if plan is not None:
            kept = {name for name, slot in self._reducer.slots.items() if slot.kept}
            self._reducer.release()  # before the new buckets, or both exist at once
            self._reducer = self._build(plan)
            for name in kept & set(self._reducer.slots):
                self._reducer.slots[name].kept = True

    def _drop_interrupted_round(self) -> None:
        """A backward ended in an error before this one: harmless only if nothing had gone out."""
        if self._reducer.started:
            raise self._break(
                SlipstreamError(
                    f"The backward of step {self._step} ended in an error after some of its "
                    "gradients had been averaged, so ranks may differ. Make a new GradientSync, "
                    "which starts from rank 0's parameters."
                )
            )
        self._watch.forget()
        self._round_open = False
        self._reducer.in_flight = False

    def _build(self, plan: Plan) -> Reducer:
        return Reducer(
            plan,
            self._params,
            self._strides,
            self._collective,
            self._channel,
            world_size=self.world_size,
            check_finite=self._check_finite,
        )

    def _broadcast_model(self) -> None:
        buffers = [b for name, b in self._model.named_buffers() if name not in self._ignore]
        tensors = [*self._params.values(), *buffers]
        self._peers.broadcast(tensors, "broadcasting rank 0's parameters")

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _break(self, error: SlipstreamError) -> SlipstreamError:
        """Nothing can be averaged any more; later calls raise the same error."""
        self._broken = error
        return error

    def _fail(self, error: Exception) -> None:
        """An error of this rank's own: the others learn it instead of waiting for the limit."""
        if self._broken is None:
            broken = error if isinstance(error, SlipstreamError) else SlipstreamError(str(error))
            self._break(broken)
            self._peers.post_failure(str(error), f"running step {self._step}", cause=True)
