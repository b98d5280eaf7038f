"""A background thread that works ahead of its consumer by a bounded number of items."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over `source` in a background thread, at most `depth` items ahead.

    Work begins at construction, not at the first `next`. Order and items are those of `source`.
    An exception in `source` is raised in the consumer when it reaches that place, and again on
    each later `next`. `close` (also by `with`, or by dropping the last reference) ends the
    thread; a consumer that waits in another thread is woken.

    `waited_seconds` is how long the last `next` waited for its item; near zero means that the
    producer keeps ahead of the consumer.
    """

    def __init__(self, source: Iterator[Item], *, depth: int = 2, name: str = "prefetch") -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}: a prefetcher works at least one item ahead")
        self.waited_seconds = 0.0
        self._shelf: _Shelf[Item] = _Shelf(depth)
        # The thread holds the shelf, not this object: a consumer that is dropped without `close`
        # is collected, and that closes the shelf and so ends the thread.
        self._thread = threading.Thread(
            target=_produce, args=(source, self._shelf), name=name, daemon=True
        )
        self._finalizer = weakref.finalize(self, self._shelf.close)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        begin = time.perf_counter()
        item = self._shelf.take()
        self.waited_seconds = time.perf_counter() - begin
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread once it has finished the item it is at; may be called repeatedly."""
        self._finalizer()
        self._thread.join()


class _Shelf(Generic[Item]):
    """What lies between the two threads: finished items, the end, an error, the closing."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[Item] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: Item) -> bool:
        """Waits for room and adds `item`; False when the shelf was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()

    def take(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ended or bool(self._items))
            if self._closed:
                raise RuntimeError("this prefetcher is closed and gives no more items")
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _produce(source: Iterator[Item], shelf: _Shelf[Item]) -> None:
    error: BaseException | None = None
    try:
        for item in source:
            if not shelf.put(item):
                return
    # Everything, SystemExit too: a consumer must never wait for a thread that is gone.
    except BaseException as caught:
        error = caught
    shelf.end(error)
