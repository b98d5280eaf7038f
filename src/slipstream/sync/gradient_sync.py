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
from slipstream.comm import Alone, Collectives, NativeHalves
from slipstream.comm.peers import Peers
from slipstream.comm.torch_comm import destroy_group, own_group
from slipstream.errors import SlipstreamError
from slipstream.plan import Plan, PlanHistory
from slipstream.sync import registry, wrapping
from slipstream.sync.buffers import in_layout
from slipstream.sync.channel import channel_for
from slipstream.sync.debts import Debts
from slipstream.sync.deferred import DeferredOptimizer, Updates, guard_bypass, refuse_inseparable
from slipstream.sync.forward_watch import ForwardWatch
from slipstream.sync.hooks import register_hooks
from slipstream.sync.means import Means
from slipstream.sync.nonfinite import find_nonfinite
from slipstream.sync.pipeline import Pipeline
from slipstream.sync.planning import PlanKeeper
from slipstream.sync.plans import Plans
from slipstream.sync.report import NonFinite, StepTimeline
from slipstream.sync.rounds import Rounds
from slipstream.sync.scaler_guard import refuse_early_unscale
from slipstream.sync.uneven import scale_for_sums, uneven_windows

Batch = TypeVar("Batch")


class GradientSync(Plans, Debts):
    """Averages a replicated model's gradients over ranks while backward goes on.

    After `loss.backward()` every `p.grad` is the mean over ranks of the ranks' gradients, a rank
    that did not use a parameter counting as zero; a parameter that no rank used keeps the gradient
    that it had. On construction rank 0's parameters and buffers overwrite those of the others.

        sync = GradientSync(model)
        loss.backward()
        optimizer.step()

    Arguments, the same on every rank:
      model: any module whose parameters are replicated and live on one device. Its trainable
        parameters get hooks; nothing else of it is touched, and `close` removes them. The engine
        lives as long as the model, whether or not anyone keeps it in a variable.
      plan: a planner's name (`wfbp`, `single`, `fixed`, `ddp`) or a Plan that covers exactly the
        trainable parameters. A named planner first goes by the reverse order of registration, and
        after one step by the order in which gradients became ready on rank 0.
      plan_options: of the named planner, such as {"cap_bytes": 2**20}.
      group: a process group that nothing else uses while gradients are in flight; None makes one
        over all ranks (a world of one rank where torch.distributed is not initialised).
      store: where failures are posted; None takes the one under the group.
      timeout_seconds: limit of every wait. A passed group keeps its own limit for collectives.
      check_finite: lets `nonfinite` tell where gradients that are not finite began (one more read).
      cluster: the ranks' nodes, for plans and for collectives that go by them; None means one.
      model_name: for the plan's record; None takes the name of the model's class.
      recorded, first_step: the plans of an earlier run of this training, and how many synchronised
        backwards it has behind it: they are in force again at their steps, so that training goes
        on bit for bit. Nothing is learnt until other parameters become trainable.
      ignore: names of parameters and buffers that stay the rank's own.

    Raises RanksDiffer on every rank when models or settings differ, UnsupportedModel for sharded,
    lazy or multi-device models, PlanError for a plan that does not fit, RankFailure when a rank
    does not come, SlipstreamError for a model that has a GradientSync, or an impossible setting.
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
        model_name: str | None = None,
        recorded: PlanHistory | None = None,
        first_step: int = 0,
        ignore: Collection[str] = (),
    ) -> None:
        wrapping.check_arguments(model, group, timeout_seconds, ignore)
        registry.make_way(model)
        self._model = weakref.ref(model)
        self._ignore = frozenset(ignore)
        self._params = wrapping.collect_parameters(model, self._ignore)
        device = wrapping.device_of(self._params)
        self._owns_group = group is None and dist.is_initialized()
        self._group = own_group(timeout_seconds) if self._owns_group else group
        self._timeout_seconds = timeout_seconds
        self._check_finite = check_finite
        self._peers = Peers(self._group, store, timeout_seconds, device)
        self._channel = channel_for(device, self.world_size)
        self._cluster = wrapping.cluster_of(cluster, self.world_size)
        self._keeper = PlanKeeper(
            plan,
            plan_options or {},
            self._cluster,
            model=model_name or type(getattr(model, "_orig_mod", model)).__name__,
            recorded=recorded,
            first_step=first_step,
        )
        settings = [*self._settings(), f"check_finite={check_finite}", sorted(self._ignore)]
        self._strides = wrapping.agree_on_model(self._params, settings, self._peers)
        self._collectives = Collectives(self._group, self._cluster, device)
        means = Means(
            params=self._params,
            strides=self._strides,
            collectives=self._collectives,
            halves=NativeHalves(self._group) if self._group and self.world_size > 1 else Alone(),
            channel=self._channel,
            peers=self._peers,
            timeout_seconds=timeout_seconds,
            check_finite=check_finite,
        )
        self._rounds = Rounds(means, self._keeper)
        # only now, as what does not fit is refused before anything is overwritten
        tensors: dict[str, torch.Tensor] = {**self._params, **self._buffers()}
        self._peers.broadcast(tensors, "broadcasting rank 0's parameters and buffers")
        self._pipeline = Pipeline(self._rounds)
        self._updates: Updates | None = None
        self._closed = False
        self._handles: list[Any] = register_hooks(self._params, self._rounds)
        registry.keep(model, self)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._peers.rank

    @property
    def world_size(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return self._peers.world_size

    @property
    def broken(self) -> bool:
        """Whether a failure has ended averaging for good."""
        return self._rounds.broken is not None

    @property
    def timeline(self) -> StepTimeline:
        """When the buckets of the last finished round travelled. On a GPU reading it waits."""
        return self._rounds.timeline()

    @property
    def exposed_seconds(self) -> float:
        """As that of `timeline`; reading it waits for nothing."""
        return self._rounds.exposed_seconds

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate locally; the next one outside averages all of it."""
        before, self._rounds.enabled = self._rounds.enabled, False
        try:
            yield
        finally:
            self._rounds.enabled = before

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Waits for the averages in `optimizer.step()` instead of in backward (wait="update").

        Between the two `p.grad` must not be touched, except after `wait()`, or through
        `clip_grad_norm_` and `unscale_`, which wait. Call it on every rank alike.
        """
        self._rounds.wait_for_update = True
        reference = weakref.ref(self._rounds)

        def before_step(*_: object) -> None:
            rounds = reference()
            if rounds is not None:
                refuse_early_unscale(rounds.in_flight)
                rounds.wait()

        self._handles.append(optimizer.register_step_pre_hook(before_step))

    def deferred(
        self, optimizer: torch.optim.Optimizer, *, separable: bool = False
    ) -> DeferredOptimizer:
        """An optimizer to use in the place of `optimizer`, which updates in the next forward.

            optimizer = sync.deferred(optimizer)

        Needed by plans that gather in the forward (planner "pipelined"), before their first
        backward; with other plans it waits and steps as after `attach`. Groups and state stay
        those of `optimizer`, which must be separable by parameter: what it does to one depends on
        that one's gradient and state and its group's values alone. torch's own are, but for LBFGS;
        separable=True states it of any other class, which is refused without.

        With a plan that gathers, `p.grad` is None from a parameter's turn in backward until its
        update in the next forward; from then on it is the average, until the next gradient.
        Clip with `clip_grad_norm_`, not with torch's function, which would find nothing. A step
        that is left out is ended by `zero_grad()` of the deferred optimizer. Evaluation, forwards
        under no_grad, state_dict() of model and optimizer, sync_buffers() and close() bring
        parameters up to date first; whoever else reads them outside of the model's forward (a
        moving average of weights, copy.deepcopy) calls `flush` before. Inside torch.compile all
        is updated when the forward starts, at a break of the graph: fullgraph=True is refused.

        Raises SlipstreamError for an optimizer that is not, or not known to be, separable and for a
        second one. Call it on every rank alike.
        """
        refuse_inseparable(optimizer, stated=separable)
        if self._rounds.momentum is not None:
            raise SlipstreamError(
                "This GradientSync corrects momentum, which takes an optimizer that steps at once; "
                "use it without sync.deferred()."
            )
        model = self._model()
        if self._updates is not None or model is None:
            raise SlipstreamError("A GradientSync defers the updates of one optimizer, once.")
        self.wait()
        self._rounds.wait_for_update = True
        self._updates = Updates(self._rounds, self._pipeline, optimizer)
        self._rounds.flush = self._updates.flush
        self._watch = ForwardWatch(model, self._params, self._updates)
        self._handles += [*guard_bypass(self._updates), *self._watch.register(model)]
        return DeferredOptimizer(self._updates)

    @property
    def is_deferred(self) -> bool:
        """Whether there is a deferred optimizer, which plans that gather need."""
        return self._updates is not None

    def flush(self) -> None:
        """Brings the parameters up to date where a deferred optimizer has updates to do.

        Nothing happens where it has not. Raises RankFailure.
        """
        if self._updates is not None:
            self._updates.flush()

    def wait(self) -> None:
        """Returns when `p.grad` holds the averages of the last backward. Raises RankFailure.

        Brings parameters up to date first. With a plan that gathers, averages that no step has
        asked for are gathered at once, so that nothing of it is hidden in the forward: all ranks
        call it alike.
        """
        self._rounds.wait()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Waits, then scales the averages so that their total norm is at most `max_norm`.

        Mutates `p.grad`, or this rank's pieces of averages that are still to be gathered. Returns
        the norm before (0-d), which is the same on all ranks.
        """
        if self._pipeline.scattered:
            return self._pipeline.clip(max_norm, norm_type)
        self.wait()
        found = [(name, p) for name, p in self._params.items() if p.grad is not None]
        # in the agreed layout, since a norm's last bit depends on the order of the elements
        grads = [in_layout(p.grad, self._strides[name]) for name, p in found if p.grad is not None]
        norm = nn.utils.get_total_norm(grads, norm_type)
        nn.utils.clip_grads_with_norm_([p for _, p in found], max_norm, norm)
        return norm

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
        return find_nonfinite(self._pipeline.flagged(), self._peers)

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
        self._peers.broadcast(self._buffers(), "broadcasting buffers")

    def close(self) -> None:
        """Removes every hook and ends the channel; gradients stay. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        registry.drop(self._model())
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            if not self.broken:
                self.wait()
        finally:  # where peers are gone, what is on the channel may wait for them
            self._channel.close(0.0 if self.broken else self._timeout_seconds)
        if not self.broken:
            self._collectives.close()
            if self._owns_group and self._group is not None:
                destroy_group(self._group)

    def _settings(self) -> list[Any]:
        """What decides about plans; ranks compare it, one entry after the other."""
        return [self._keeper.describe()]

    def _set_enabled(self, enabled: bool) -> None:
        self._rounds.enabled = enabled

    def _take_part_without_gradient(self) -> None:
        self._rounds.take_part_without_gradient()

    def _buffers(self) -> dict[str, torch.Tensor]:
        model = self._model()
        if model is None:
            raise SlipstreamError("The model of this GradientSync does not exist any more.")
        return {n: b for n, b in model.named_buffers() if n not in self._ignore}
