"""`sync.deferred(optimizer)`: the update is done in the next forward, bucket by bucket."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import optim
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer, SparseAdam

from slipstream.errors import SlipstreamError
from slipstream.sync.parts import Parts
from slipstream.sync.pieces import Piece
from slipstream.sync.pipeline import Pipeline
from slipstream.sync.rounds import Rounds

_SCALER_LOOKS = GradScaler._unscale_grads_.__code__


class Updates:
    """The updates of one optimizer, each due from its `step` until the next forward needs it.

    pending: some of the last one are still to be done.
    """

    def __init__(self, rounds: Rounds, pipeline: Pipeline, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._rounds = rounds
        self._pipeline = pipeline
        self._parts = Parts(optimizer)
        self._waiting: set[int] = set()
        self._buckets: dict[str, int] = {}
        self._stepping = False

    @property
    def pending(self) -> bool:
        """Whether parameters are not up to date."""
        return bool(self._waiting)

    def step(self) -> None:
        """Sends the averages on their way to all ranks; or steps now where they are there."""
        pipeline = self._pipeline
        if not pipeline.scattered:
            self._rounds.wait()
            pipeline.drop_spent()
            self._run(self.optimizer.step)
            return
        self._parts.remember()
        self._buckets = pipeline.gather()
        self._waiting = set(self._buckets.values())
        strangers = self._parts.others(pipeline.params())
        self._run(lambda: self._parts.step(p for p in strangers if p.grad is not None))
        if not self._waiting:  # nothing is trainable
            pipeline.end()

    def need(self, names: Iterable[str]) -> None:
        """Updates these parameters and those that came with them. Raises RankFailure."""
        found = {self._buckets[name] for name in names if name in self._buckets}
        self._apply(sorted(found & self._waiting))

    def flush(self) -> None:
        """Updates every parameter that is not up to date."""
        self._apply(sorted(self._waiting))

    def pending_names(self) -> list[str]:
        """The parameters that are not up to date."""
        return [name for name, index in self._buckets.items() if index in self._waiting]

    def refuse_bypass(self) -> None:
        """Called before every step of the user's optimizer: it must be one of ours."""
        if not self._stepping:
            raise SlipstreamError(
                "This optimizer was given to sync.deferred(), whose result is to be used in its "
                "place: optimizer = sync.deferred(optimizer), also for GradScaler."
            )

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears gradients, and averages with which nobody has stepped."""
        self.optimizer.zero_grad(set_to_none)
        if not self.pending:
            self._pipeline.drop()

    def materialise(self) -> None:
        """Makes averages that no step has asked for `p.grad`, on all ranks alike."""
        if not self.pending:
            self._rounds.wait()

    def _apply(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._waiting.discard(index)
            self._update([p for p in self._pipeline.take(index) if p.has_gradient()])
            if not self._waiting:
                self._pipeline.end()

    def _update(self, pieces: list[Piece]) -> None:
        self._run(lambda: self._parts.step(piece.param for piece in pieces))
        for piece in pieces:
            piece.spent = piece.param.grad

    def _run(self, step: Callable[[], Any]) -> None:
        self._stepping = True
        try:
            step()
        finally:
            self._stepping = False


class DeferredOptimizer(Optimizer):
    """What `sync.deferred(optimizer)` returns, to be used in the place of that optimizer.

    With a plan that gathers, `step()` takes note of the groups' values (learning rate and others)
    and returns; the update of each parameter runs in the next forward before its first use, or
    when `sync.flush()`, a state_dict, evaluation, or the next backward wants it. With any other
    plan `step()` waits for the averages and steps.

    Groups, state and hooks are those of the optimizer, whose own step hooks run once a part.
    """

    _step_supports_amp_scaling = False  # GradScaler leaves scaling to no fused optimizer beneath

    def __init__(self, updates: Updates) -> None:
        # not Optimizer.__init__: groups and state are the wrapped optimizer's, see __getattr__
        self._updates = updates

    def __getattr__(self, name: str) -> Any:
        if name == "_updates":
            raise AttributeError(name)
        updates = self._updates
        if name == "state":
            updates.flush()
        elif name == "param_groups" and sys._getframe(1).f_code is _SCALER_LOOKS:
            updates.materialise()  # GradScaler is about to look at the averages
        return getattr(updates.optimizer, name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Puts the update off. Raises SlipstreamError for a closure, RankFailure."""
        if closure is not None:
            raise SlipstreamError(
                "A deferred optimizer takes no closure: it steps when the model is run the next "
                "time; call loss.backward() before step()."
            )
        # a schedule that was made on the optimizer itself asks whether that has been stepped
        self._updates.optimizer.__dict__["_opt_called"] = True
        self._updates.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients. Averages that were not stepped with are dropped, on all ranks alike."""
        self._updates.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, up to date."""
        self._updates.flush()
        return self._updates.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the optimizer, after what was put off."""
        self._updates.flush()
        self._updates.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds to the optimizer, after what was put off."""
        self._updates.flush()
        self._updates.optimizer.add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise SlipstreamError(
            "A deferred optimizer belongs to its GradientSync and cannot be copied or pickled; "
            "save its state_dict()."
        )


SEPARABLE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adafactor,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.Muon,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""Optimizers that update a parameter from its own gradient and state and the group's values alone.

The classes themselves: a subclass may do anything in its step.
"""


def refuse_inseparable(optimizer: Optimizer, *, stated: bool) -> None:
    """Raises SlipstreamError for an optimizer that cannot step on one parameter at a time.

    stated: its user says that it can; what is not known to be separable is refused without that.
    """
    if isinstance(optimizer, DeferredOptimizer):
        raise SlipstreamError("This optimizer is deferred already.")
    if isinstance(optimizer, LBFGS):
        raise SlipstreamError(
            "LBFGS mixes all parameters in one step and calls a closure, so its update cannot be "
            "deferred; use it without sync.deferred()."
        )
    if isinstance(optimizer, SparseAdam):
        raise SlipstreamError(
            "SparseAdam takes sparse gradients, and averages over ranks are dense; use Adam."
        )
    if not stated and type(optimizer) not in SEPARABLE:
        raise SlipstreamError(
            f"{type(optimizer).__name__} is not known to be separable by parameter. A deferred"
            " update steps on a few parameters at a time, and an optimizer whose parameters share a"
            " number (the step size of Prodigy or D-Adaptation, a norm over the model) would"
            " silently compute another one; use it without sync.deferred() and with a plan that"
            " does not gather. If each parameter's update depends on its own gradient and state and"
            " its group's values alone, say so: sync.deferred(optimizer, separable=True)."
        )


def guard_bypass(updates: Updates) -> list[Any]:
    """Hooks on the user's optimizer, as handles: it is not stepped or saved behind our back."""
    reference = weakref.ref(updates)

    def before_step(*_: object) -> None:
        updates = reference()
        if updates is not None:
            updates.refuse_bypass()

    def before_state(*_: object) -> None:
        updates = reference()
        if updates is not None:
            updates.flush()

    optimizer = updates.optimizer
    return [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_state_dict_pre_hook(before_state),
        optimizer.register_load_state_dict_pre_hook(before_state),
    ]
