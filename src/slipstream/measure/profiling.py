"""A model's steps, recorded as they run -> Trace.

Backward begins, as a trace counts it, when the gradient of the model's output is there: what the
loss takes, forwards and backwards, is part of the forward. No gradient is ready in it, so nothing
that can be planned changes, and no one has to say where it is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim.optimizer import register_optimizer_step_post_hook

from slipstream.comm.peers import Peers
from slipstream.errors import TraceError
from slipstream.measure.clocks import Clock, clock_for
from slipstream.measure.merging import check_alike, lateness, medians, merged
from slipstream.measure.readers import first_points
from slipstream.measure.recorder import Recorder
from slipstream.measure.watching import Watch, watched_parameters
from slipstream.trace import Trace

_AGREEING = "agreeing on what was profiled"


class Profiler:
    """Records the steps that a model trains, without changing a bit of them, until it is closed.

        with Profiler(model, steps=8) as profiler:
            while not profiler.done:
                ...                      # anyone's training loop
        trace = profiler.trace(peers)

    A step ends with the last `step()` of an optimizer that holds a parameter of the model before
    the next forward; what comes before that forward counts as input. `begin_step` and `end_step`
    draw these lines by hand instead.

    Arguments: steps: after how many recorded steps it is done; later ones are left out. warmup:
    steps before them that are not counted, at least 1. waited: the seconds for which the step that
    has just ended waited for averages after its backward; they are taken out of its update. clock:
    by default events on GPUs and the process's own clock on CPUs.
    Raises UnsupportedModel for a model that cannot be trained with replicas.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int = 8,
        warmup: int = 2,
        waited: Callable[[], float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if steps < 1 or warmup < 1:
            raise ValueError("a profile takes at least one step, and one before it to warm up")
        params = watched_parameters(model)
        self.name = type(getattr(model, "_orig_mod", model)).__name__
        self.parameters = [
            (name, param.numel(), str(param.dtype).removeprefix("torch."))
            for name, param in reversed(params.items())
        ]
        self.device = next(iter(params.values())).device
        self.steps = steps
        self.warmup = warmup
        self._clock = clock or clock_for(self.device)
        self._ids = frozenset(id(param) for param in params.values())
        names = {id(param): name for name, param in params.items()}
        self._recorder = Recorder(self._clock, names, warmup=warmup, waited=waited)
        self._by_hand = False
        self._watch = Watch(model, params, self._recorder)
        _followers.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def done(self) -> bool:
        """Whether enough steps are recorded. The last counts once the next one has begun."""
        return len(self._recorder.steps) >= self.steps

    def begin_step(self) -> None:
        """A step begins here, with its input; from now on steps are counted by hand."""
        self._by_hand = True
        self._recorder.begin()

    def end_step(self) -> None:
        """The step that `begin_step` began ends here."""
        self._recorder.end()
        self._recorder.close()

    def close(self) -> None:
        """Takes all hooks off the model; what was recorded stays. Safe to call twice."""
        _followers.discard(self)
        self._watch.remove()

    def trace(
        self, peers: Peers, *, model: str | None = None, batch_size: int | None = None
    ) -> Trace:
        """The trace of all ranks together, the same on each; all of them call it.

        model: its name in the trace, by default its class's. batch_size: samples a rank in a step,
        by default the first dimension of what the model's forward was given. Raises TraceError,
        RanksDiffer or RankFailure, on every rank.
        """
        check_alike(peers.gather(self.agreement(), _AGREEING))
        steps = self._recorder.steps[: self.steps]
        order = [name for name, _, _ in self.parameters]
        points = first_points(self._watch.owners, self._recorder.calls, self._recorder.readers)
        mine = medians(steps, self._clock, order, points) if steps else None
        everyone = peers.gather(mine, _AGREEING)
        for rank, part in enumerate(everyone):
            if part is None:
                raise TraceError(
                    f"Rank {rank} has seen no whole training step after {self.warmup} of warming "
                    "up: the model's forward, a backward that gives its parameters gradients, and "
                    "the optimizer's step."
                )
        ranks = f"the slowest of {peers.world_size} ranks" if peers.world_size > 1 else "one rank"
        note = f"Median of {len(steps)} steps on {ranks}; {_device_words(self.device)}."
        trace = merged(
            everyone, self.parameters, model=model or self.name, batch_size=batch_size, note=note
        )
        late = lateness(trace, compiled_whole=self._watch.compiled_whole)
        return trace.model_copy(update={"note": note + late})

    def agreement(self) -> Mapping[str, Any]:
        """What must be the same on all ranks."""
        return {
            "parameters": self.parameters,
            "steps": f"{self.steps} steps after {self.warmup}",
        }

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends the step under way if the optimizer holds a parameter of the model."""
        if self._by_hand:
            return
        held = (id(param) for group in optimizer.param_groups for param in group["params"])
        if not self._ids.isdisjoint(held):
            self._recorder.end()


class _Followers:
    """The profilers that are told of every optimizer's step, by one hook for the whole process.

    The hook is registered once and stays: torch walks through its table of such hooks unguarded, so
    it must not change while another thread trains.
    """

    def __init__(self) -> None:
        self._profilers: weakref.WeakSet[Profiler] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._registered = False

    def add(self, profiler: Profiler) -> None:
        with self._lock:
            self._profilers.add(profiler)
            if not self._registered:
                register_optimizer_step_post_hook(self._stepped)
                self._registered = True

    def discard(self, profiler: Profiler) -> None:
        with self._lock:
            self._profilers.discard(profiler)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._profilers:
            return
        with self._lock:
            profilers = list(self._profilers)
        for profiler in profilers:
            profiler.optimizer_stepped(optimizer)


_followers = _Followers()


def profile(
    model: nn.Module,
    step: Callable[[], object],
    *,
    steps: int = 8,
    warmup: int = 2,
    name: str | None = None,
    batch_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    store: Store | None = None,
    timeout_seconds: float = 600.0,
    waited: Callable[[], float] | None = None,
    clock: Clock | None = None,
) -> Trace:
    """Runs `step` some times and returns when each gradient of the model becomes ready in it.

        trace = slipstream.measure.profile(model, lambda: train_on(next(batches)))

    step: a whole training step: input, forward, backward, update. It is called warmup + steps times
    on every rank; model and optimizer are changed by it as by any training, and not otherwise.
    name, batch_size, waited, clock: see `Profiler`. group: the ranks that agree on the trace; None
    takes torch.distributed's default group where there is one. timeout_seconds: limit of a wait
    through the store; a group keeps its own limit.

    Raises whatever `step` raises (the other ranks then learn it), TraceError when it trains
    nothing, RanksDiffer when ranks profile different models, RankFailure when a rank is lost.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    with Profiler(model, steps=steps, warmup=warmup, waited=waited, clock=clock) as profiler:
        peers = Peers(group, store, timeout_seconds, profiler.device)
        check_alike(peers.gather(profiler.agreement(), _AGREEING))
        try:
            for _ in range(warmup + steps):
                profiler.begin_step()
                step()
                profiler.end_step()
        except Exception as error:
            peers.post_failure(str(error), "profiling", cause=True)
            raise
        return profiler.trace(peers, model=name, batch_size=batch_size)


def _device_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s) a rank"
