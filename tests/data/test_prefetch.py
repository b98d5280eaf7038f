"""The background thread: order, errors, closing, and never a hang."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from slipstream.data import Prefetcher

LIMIT_SECONDS = 30.0  # of waits that end at once when the code is right


def test_items_come_in_order_and_then_the_end() -> None:
    with Prefetcher(iter(range(100)), depth=3) as items:
        assert list(items) == list(range(100))
        with pytest.raises(StopIteration):
            next(items)
        assert items.waited_seconds >= 0.0


def test_the_next_item_is_made_while_the_consumer_is_busy_with_this_one() -> None:
    made = [threading.Event() for _ in range(4)]

    def source() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    with Prefetcher(source(), depth=2) as items:
        assert made[0].wait(LIMIT_SECONDS), "work begins before the first next"
        assert next(items) == 0
        # The consumer is "in step 0" here and asks for nothing.
        assert made[1].wait(LIMIT_SECONDS)
        assert made[2].wait(LIMIT_SECONDS)


def test_it_runs_ahead_by_no_more_than_its_depth() -> None:
    made = 0
    beyond = threading.Event()

    def source() -> Iterator[int]:
        nonlocal made
        for number in range(50):
            made += 1
            if made > 3:
                beyond.set()
            yield number

    with Prefetcher(source(), depth=2) as items:
        # Two lie ready and the third is made but finds no room.
        assert not beyond.wait(0.2)
        assert next(items) == 0
        assert beyond.wait(LIMIT_SECONDS)
        assert made <= 4


@pytest.mark.parametrize("error", [ValueError("damaged"), SystemExit(3), MemoryError("full")])
def test_an_error_arrives_at_its_place_and_stays(error: BaseException) -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise error

    with Prefetcher(source()) as items:
        assert [next(items), next(items)] == [1, 2]
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                next(items)
            assert caught.value is error


def test_close_ends_a_thread_that_waits_for_room() -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            ended.set()

    items = Prefetcher(source(), name="waits-for-room")
    next(items)
    items.close()
    items.close()
    assert ended.wait(LIMIT_SECONDS)
    assert "waits-for-room" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="closed"):
        next(items)


def test_close_wakes_a_consumer_that_waits_for_an_item() -> None:
    release, outcome = threading.Event(), []

    def source() -> Iterator[int]:
        release.wait(LIMIT_SECONDS)
        yield 0

    def consume(items: Prefetcher[int]) -> None:
        try:
            outcome.append(str(next(items)))
        except RuntimeError as error:
            outcome.append(str(error))

    items = Prefetcher(source())
    consumer = threading.Thread(target=consume, args=(items,))
    closer = threading.Thread(target=items.close)
    consumer.start()
    closer.start()
    consumer.join(LIMIT_SECONDS)
    release.set()
    closer.join(LIMIT_SECONDS)
    assert not consumer.is_alive() and not closer.is_alive()
    assert len(outcome) == 1 and "closed" in outcome[0]


def test_dropping_it_without_close_ends_the_thread() -> None:
    def source() -> Iterator[int]:
        while True:
            yield 0

    items = Prefetcher(source(), name="dropped")
    next(items)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "dropped"]
    del items
    gc.collect()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="depth is 0"):
        Prefetcher(iter([1]), depth=0)
