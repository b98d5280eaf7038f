"""Knows when a backward pass, as the user sees it, has ended.

Autograd's own end-of-backward callback belongs to a graph task. Activation checkpointing in its
reentrant mode runs a graph task of its own for each segment, inside a node of the outer one, so the
callback fires many times in one backward. What counts is the end of the outermost task. A segment's
task sees no parameter of the outer task, and nothing can be queued on the outer task from within,
so the node in which the segment runs is asked for the nodes after it: the first of them to run
does so in the outer task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

_ENTRIES = (BackwardCFunction.apply.__code__, BackwardCFunction.apply_boxed.__code__)
current_task: Callable[[], int] = torch._C._current_graph_task_id


class BackwardWatch:
    """Calls `on_end` once, when the outermost of the graph tasks that were entered has ended.

    nested: whether a task inside another one was seen since the last end.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._open: set[int] = set()
        self._awaited: list[Any] = []
        self.nested = False

    @property
    def active(self) -> bool:
        """Whether a backward has been entered and has not ended."""
        return bool(self._open)

    def enter(self, task: int) -> None:
        """Notes that a hook runs in this graph task; cheap when it is known already."""
        if task in self._open:
            return
        self._open.add(task)
        Variable._execution_engine.queue_callback(lambda: self._ended(task))
        outer = _surrounding_node()
        if outer is not None:
            self.nested = True
            self._await_outer(outer)

    def forget(self) -> None:
        """Drops all state: after a backward that ended in an error, which no callback follows."""
        self._open.clear()
        self._release()
        self.nested = False

    def is_stale(self, task: int) -> bool:
        """Whether `task` is a new backward although an earlier one was never seen to end."""
        return (
            self.active
            and task not in self._open
            and _surrounding_node() is None
            and not (self._awaited)
        )

    def _await_outer(self, node: Any) -> None:
        if self._awaited:
            return
        for following, _ in node.next_functions:
            if following is not None:
                self._awaited.append(following.register_prehook(self._in_outer))

    def _in_outer(self, _gradients: object) -> None:
        if self._awaited:
            self._release()
            self.enter(current_task())

    def _release(self) -> None:
        for handle in self._awaited:
            handle.remove()
        self._awaited = []

    def _ended(self, task: int) -> None:
        self._open.discard(task)
        if not self._open and not self._awaited:
            self.nested = False
            self._on_end()


def _surrounding_node() -> Any | None:
    """The outermost autograd node written in Python inside which the caller runs, if any."""
    found = None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _ENTRIES:
            found = frame.f_locals.get("self")
        frame = frame.f_back  # type: ignore[assignment]
    return found
