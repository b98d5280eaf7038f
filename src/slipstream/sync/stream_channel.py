"""The channel of a GPU: collectives are enqueued on one side stream, in order; nothing blocks.

Written against torch's device modules, so that its order of calls is tested on the CPU's; it has
not run on a GPU yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class StreamTicket:
    """One enqueued operation, as `Ticket`: waiting makes the current stream wait, not the host.

    start_seconds and end_seconds are in seconds of time.perf_counter(); reading them waits for
    the GPU.
    """

    def __init__(self, channel: StreamChannel, start: Any, end: Any) -> None:
        self._channel = channel
        self._start = start
        self._end = end
        self.error: BaseException | None = None

    @property
    def start_seconds(self) -> float:
        """When the collective began on the side stream."""
        return self._channel.seconds_of(self._start)

    @property
    def end_seconds(self) -> float:
        """When it had ended there."""
        return self._channel.seconds_of(self._end)

    def wait(self, timeout_seconds: float) -> None:
        """Lets the current stream wait; raises the error that enqueuing gave.

        The limit is NCCL's own to keep.
        """
        if self.error is not None:
            raise self.error
        self._end.wait()


class StreamChannel:
    """Enqueues operations on a side stream of `device`, each after what is on the current stream.

    module: the device's module in torch, such as torch.cuda.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._module = module
        self._stream = module.Stream(device=device)
        self._origin = module.Event(enable_timing=True)
        module.synchronize(device)
        self._origin.record()
        self._origin_seconds = time.perf_counter()

    def submit(
        self, operation: Callable[[], None], begin: Callable[[], Any] | None = None
    ) -> StreamTicket:
        """Enqueues `operation` and returns at once. An error is kept for `wait`."""
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        ticket = StreamTicket(self, start, end)
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream), torch.no_grad():
            start.record()
            try:
                operation()
            except Exception as error:
                ticket.error = error
            end.record()
        return ticket

    def seconds_of(self, event: Any) -> float:
        """An event's moment in time.perf_counter() seconds; waits for it."""
        event.synchronize()
        milliseconds: float = self._origin.elapsed_time(event)
        return self._origin_seconds + milliseconds / 1e3

    def close(self, timeout_seconds: float) -> None:
        """Waits for what was enqueued."""
        self._module.current_stream().wait_stream(self._stream)
