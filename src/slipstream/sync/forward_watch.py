"""Has parameters updated before a forward reads them, where their update was put off.

A module's pre-hook brings the parameters that it holds up to date, which is in time unless they are
read elsewhere: `F.linear(x, self.embedding.weight)`, or code that calls no module (TorchScript, a
compiled block, torch's attention). So the first forward of a training is watched: all is updated
when it starts, and the autograd graph that it leaves tells which parameters were read after the
pre-hook of a module that holds them. Only those are put off from then on; the others are updated
when the model is called. Evaluation, forwards inside torch.compile (where hooks are compiled away)
and calls of a part of the model update everything first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch._compile import _disable_dynamo

from slipstream.errors import SlipstreamError
from slipstream.graph_reads import first_readers, output_nodes, sequence_number


class PutOff(Protocol):
    """Where updates wait."""

    @property
    def pending(self) -> bool:
        """Whether parameters are not up to date."""
        ...

    def need(self, names: Iterable[str]) -> None:
        """Updates these."""
        ...

    def flush(self) -> None:
        """Updates all."""
        ...

    def pending_names(self) -> list[str]:
        """Those that are not up to date."""
        ...


class ForwardWatch:
    """Listens to a model's hooks and tells `updates` what is needed."""

    def __init__(self, model: nn.Module, params: Mapping[str, nn.Parameter], updates: PutOff):
        self._updates = updates
        self._names = {id(param): name for name, param in params.items()}
        self._held = [
            tuple(self._names[id(p)] for p in module._parameters.values() if id(p) in self._names)
            for module in model.modules()
        ]
        self._inside = False
        self._attributed: frozenset[str] | None = None
        self._others: list[str] = []
        self._calls: dict[int, int] | None = None

    def register(self, model: nn.Module) -> list[Any]:
        """Hooks on the model and its modules, as handles."""
        handles: list[Any] = [model.register_forward_pre_hook(_Hook(self, _STARTS))]
        for index, module in enumerate(model.modules()):
            if self._held[index]:
                handles.append(module.register_forward_pre_hook(_Hook(self, _CALLED, index)))
            handles.append(module.register_state_dict_pre_hook(_Hook(self, _FLUSH)))
            handles.append(module.register_load_state_dict_pre_hook(_Hook(self, _FLUSH)))
        handles.append(model.register_forward_hook(_Hook(self, _ENDS)))
        return handles

    def forward_starts(self, model: nn.Module) -> None:
        """The model is called."""
        updates = self._updates
        self._inside, self._calls = False, None
        if self._attributed is not None and not updates.pending:
            return
        watched = model.training and torch.is_grad_enabled() and not _inside_compile()
        if not watched:
            updates.flush()
            return
        self._inside = True
        if self._attributed is None:
            updates.flush()
            self._calls = {}
        else:
            updates.need(self._others)

    def module_called(self, index: int) -> None:
        """A module that holds parameters is called."""
        if self._calls is not None:
            self._calls.setdefault(index, sequence_number())
        if self._updates.pending:
            if self._inside:
                self._updates.need(self._held[index])
            else:
                self._updates.flush()

    def forward_ends(self, output: object) -> None:
        """The model returns. Raises SlipstreamError when a parameter was read out of date."""
        self._inside = False
        if self._calls is not None:
            self._attribute(first_readers(output_nodes(output), self._names), self._calls)
            self._calls = None
        if self._updates.pending:
            self._check_unread(output)
            self._updates.flush()

    def flush(self) -> None:
        """Somebody reads or writes the parameters."""
        self._updates.flush()

    def _attribute(self, readers: Mapping[str, int], calls: Mapping[int, int]) -> None:
        """Learns which parameters are read after a module that holds them is called."""
        ready: dict[str, int] = {}
        for index, number in calls.items():
            for name in self._held[index]:
                ready[name] = min(number, ready.get(name, number))
        in_time = {n for n, number in readers.items() if n in ready and ready[n] <= number}
        self._attributed = frozenset(in_time)
        self._others = [name for name in self._names.values() if name not in in_time]

    def _check_unread(self, output: object) -> None:
        """What no module has asked for must not have been read."""
        late = set(self._updates.pending_names())
        read = first_readers(output_nodes(output), self._names)
        for name in sorted(late & set(read)):
            self._attributed = None
            raise SlipstreamError(
                f"The forward read parameter {name!r} before its update, as no module that holds "
                "it was called (was it compiled, or its method called directly, after the first "
                "steps?). Call sync.flush() before this forward."
            )


_STARTS, _CALLED, _ENDS, _FLUSH = range(4)


class _Hook:
    """A hook that holds the watch weakly; copies and pickles of it do nothing.

    So models can be copied and pickled, and their copies are nobody's business.
    """

    def __init__(self, watch: ForwardWatch | None, kind: int, index: int = 0) -> None:
        self._watch = None if watch is None else weakref.ref(watch)
        self._kind = kind
        self._index = index

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self._kind == _STARTS:
            self._update_before_forward(module)
            return
        if torch.compiler.is_compiling():  # the forward's start has brought all up to date
            return
        watch = self._watch() if self._watch is not None else None
        if watch is None:
            return
        if self._kind == _CALLED:
            watch.module_called(self._index)
        elif self._kind == _ENDS:
            watch.forward_ends(args[-1])
        else:
            watch.flush()

    @_disable_dynamo
    def _update_before_forward(self, module: nn.Module) -> None:
        watch = self._watch() if self._watch is not None else None
        if watch is not None:
            watch.forward_starts(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self._kind)


def _inside_compile() -> bool:
    """Whether this runs in a break of something that torch.compile compiled."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
