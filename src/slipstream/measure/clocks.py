"""What a moment is while a step is recorded: a clock reading on CPUs, an event on a GPU's stream.

Neither makes anyone wait: an event is enqueued like a kernel, and read once all steps are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes notes of moments, and tells the time between two of them later."""

    def mark(self) -> Any:
        """This moment in the order of the computation; returns at once."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """The seconds from one mark to another; may wait for the device."""
        ...


class HostClock:
    """Moments of the process itself, where the computation runs in it.

    now: seconds from any fixed point on.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        """The clock's reading."""
        return self._now()

    def seconds(self, start: float, end: float) -> float:
        """The difference of two readings."""
        return end - start


class DeviceClock:
    """Moments on the current stream of a device, as events.

    module: the device's module in torch, such as torch.cuda. Tested against a module that takes
    notes; it has not run on a GPU yet.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def mark(self) -> Any:
        """An event on the current stream: passed when everything before it there is done."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two events; waits for the later one."""
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock of what runs on `device`."""
    return DeviceClock(torch.cuda) if device.type == "cuda" else HostClock()
