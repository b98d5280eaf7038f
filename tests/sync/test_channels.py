"""Channels: order, errors, limits; the GPU's against a device module that takes notes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch

from ranks import Rank, run_ranks
from slipstream.errors import RankFailure, UnsupportedModel
from slipstream.sync import GradientSync
from slipstream.sync.channel import InlineChannel, ThreadChannel, channel_for
from slipstream.sync.stream_channel import StreamChannel
from small_models import assert_matches, batch, gradients, loss_of, mlp


def test_operations_run_one_after_the_other_in_order() -> None:
    channel, seen, running = ThreadChannel(), [], threading.Lock()

    def operation(number: int) -> None:
        assert running.acquire(blocking=False), "two at once"
        seen.append(number)
        running.release()

    tickets = [channel.submit(lambda n=number: operation(n)) for number in range(50)]  # type: ignore[misc]
    for ticket in tickets:
        ticket.wait(5.0)
    channel.close(5.0)
    assert seen == list(range(50))
    for earlier, later in pairwise(tickets):
        assert earlier.start_seconds <= earlier.end_seconds <= later.start_seconds


def test_after_an_error_nothing_more_is_run() -> None:
    channel, seen = ThreadChannel(), []

    def fail() -> None:
        raise ValueError("broken link")

    first, second = channel.submit(fail), channel.submit(lambda: seen.append(1))
    for ticket in (first, second):
        with pytest.raises(ValueError, match="broken link"):
            ticket.wait(5.0)
    channel.close(5.0)
    assert seen == []


class Work:
    """What a backend hands out for an operation that it has begun.

    As Gloo's, it tells its future's listeners before it wakes those who wait.
    """

    def __init__(self) -> None:
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._ended = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
        self._ended.set()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def wait(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        if not self._ended.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        self._future.value()


def test_a_free_channel_lets_the_backend_begin_and_a_busy_one_queues() -> None:
    channel, work, seen = ThreadChannel(), Work(), list[str]()

    def begin() -> Work:
        seen.append("begun")
        return work

    first = channel.submit(lambda: seen.append("never"), begin)
    second = channel.submit(lambda: seen.append("queued"), begin)
    third = channel.submit(lambda: seen.append("last"))
    assert seen == ["begun"] and not first.done and not second.done
    work.end()
    for ticket in (first, second, third):
        ticket.wait(5.0)
    assert seen == ["begun", "queued", "last"]
    assert first.end_seconds <= second.start_seconds <= second.end_seconds <= third.start_seconds
    fourth = channel.submit(lambda: seen.append("never"), begin)
    fourth.wait(5.0)
    assert seen[-1] == "begun"
    fifth = channel.submit(lambda: seen.append("cannot begin"), lambda: None)
    fifth.wait(5.0)
    assert seen[-1] == "cannot begin"
    channel.close(5.0)


def test_after_the_backends_error_nothing_more_is_begun_or_run() -> None:
    channel, work, seen = ThreadChannel(), Work(), list[str]()
    first = channel.submit(lambda: seen.append("run"), lambda: work)
    second = channel.submit(lambda: seen.append("run"))
    work.end(ValueError("broken link"))
    third = channel.submit(lambda: seen.append("run"), lambda: seen.append("begun"))
    for ticket in (first, second, third):
        with pytest.raises(ValueError, match="broken link"):
            ticket.wait(5.0)
        assert isinstance(ticket.error, ValueError)
    channel.close(5.0)
    assert seen == []


def test_what_cannot_even_begin_is_told_to_the_one_who_waits() -> None:
    channel = ThreadChannel()

    def begin() -> Work:
        raise ValueError("no such group")

    ticket = channel.submit(lambda: None, begin)
    with pytest.raises(ValueError, match="no such group"):
        ticket.wait(5.0)
    channel.close(5.0)


def test_waiting_for_the_backend_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.sync.tickets._GRACE_SECONDS", 0.05)
    channel, work = ThreadChannel(), Work()
    ticket = channel.submit(lambda: None, lambda: work)
    with pytest.raises(RankFailure, match="not ended within"):
        ticket.wait(0.05)
    channel.close(0.05)
    work.end()
    assert ticket.done


def test_waiting_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.sync.tickets._GRACE_SECONDS", 0.05)
    channel, release = ThreadChannel(), threading.Event()

    def stuck() -> None:
        release.wait(10.0)

    ticket = channel.submit(stuck)
    with pytest.raises(RankFailure, match="not ended within"):
        ticket.wait(0.05)
    release.set()
    channel.close(5.0)


def test_each_device_gets_its_channel() -> None:
    assert isinstance(channel_for(torch.device("cpu"), 1), InlineChannel)
    assert isinstance(channel_for(torch.device("cpu"), 2), ThreadChannel)
    with pytest.raises(UnsupportedModel, match="meta device"):
        channel_for(torch.device("meta"), 2)


class NotedDevice:
    """A device module whose streams and events write down what is asked of them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.current = "main"
        self.clock = 0.0
        device = self

        class Stream:
            def __init__(self, device: Any = None, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Any) -> None:
                device.notes.append(f"{self.name} waits for {other.name}")

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = -1.0

            def record(self) -> None:
                device.clock += 1.0
                self.at = device.clock
                device.notes.append(f"event on {device.current}")

            def wait(self) -> None:
                device.notes.append(f"{device.current} waits for event")

            def synchronize(self) -> None:
                assert self.at > 0

            def elapsed_time(self, later: Any) -> float:
                return 1000.0 * float(later.at - self.at)

        self.Stream, self.Event = Stream, Event

    def synchronize(self, device: Any) -> None:
        self.notes.append("synchronize")

    def current_stream(self) -> Any:
        return self.Stream(name=self.current)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


def test_a_stream_orders_the_collective_after_the_copies_and_before_the_use() -> None:
    device = NotedDevice()
    channel = StreamChannel(torch.device("cpu"), device)
    device.notes.clear()
    ticket = channel.submit(lambda: device.notes.append(f"collective on {device.current}"))
    ticket.wait(1.0)
    channel.close(1.0)
    assert device.notes == [
        "side waits for main",
        "event on side",
        "collective on side",
        "event on side",
        "main waits for event",
        "main waits for side",
    ]
    assert ticket.end_seconds - ticket.start_seconds == pytest.approx(1.0)


def test_a_stream_keeps_an_error_for_the_one_who_waits() -> None:
    device = NotedDevice()
    channel = StreamChannel(torch.device("cpu"), device)

    def fail() -> None:
        raise ValueError("no such group")

    ticket = channel.submit(fail)
    assert device.current == "main"
    with pytest.raises(ValueError, match="no such group"):
        ticket.wait(1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_ranks_on_one_gpu() -> None:
    """Gloo between two ranks of one GPU: streams, events and views as NCCL would use them."""

    def train(rank: Rank) -> dict[str, torch.Tensor | None]:
        model = mlp().cuda()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        for step in range(3):
            model.zero_grad()
            loss_of(model, batch(rank.rank, step).cuda()).backward()
        assert sync.timeline.buckets[0].end_seconds > sync.timeline.buckets[0].start_seconds
        sync.close()
        return {name: None if g is None else g.cpu() for name, g in gradients(model).items()}

    reference = mlp()
    loss_of(reference, torch.cat([batch(r, 2) for r in range(2)])).backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference), rtol=1e-9)
