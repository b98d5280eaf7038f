"""The start of a job: each rank says that it is here, and those who do not come are named.

The store under a process group only counts who connected. Here every rank leaves its number first,
and whoever sees all of them, or runs out of time, decides for all: either everybody goes on, or
everybody says the same sentence.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from slipstream.errors import LaunchError, RankFailure
from slipstream.train.launch.joined import MeetingPoint

Result = TypeVar("Result")

HEAR_FAILURE_SECONDS = 5.0
"""How long the host of a store stays after a failure, for the others to read it."""

_ANSWER_SECONDS = 3.0
_SHORTEST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.5
_VERDICT = "absent"


def open_store(point: MeetingPoint, timeout_seconds: float) -> TCPStore:
    """Connects to the job's store; on the rank that holds it, opens it.

    Opened twice in one process it is one server. Raises LaunchError where the port is taken or
    nobody listens within ``timeout_seconds``, RankFailure where who listens does not answer.
    """
    begin = time.monotonic()
    if not point.is_host:
        _await_listener(point, timeout_seconds)
    left = timeout_seconds - (time.monotonic() - begin)

    def connect() -> TCPStore:
        return TCPStore(
            point.address,
            point.port,
            is_master=point.is_host,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        return _answered(connect, left, point)
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise LaunchError(
                f"port {point.port} of {point.address} is in use: set MASTER_PORT to a free one"
            ) from error
        raise _unreachable(point, timeout_seconds, error) from error


def _await_listener(point: MeetingPoint, timeout_seconds: float) -> None:
    """Returns once somebody listens where ranks meet.

    A store's client would try for twice its limit, and log each attempt with a stack trace.
    """
    begin = time.monotonic()
    while True:
        waited = time.monotonic() - begin
        left = max(timeout_seconds - waited, _SHORTEST_PAUSE_SECONDS)
        try:
            socket.create_connection((point.address, point.port), timeout=left).close()
        except OSError as error:
            if time.monotonic() - begin >= timeout_seconds:
                raise _unreachable(point, timeout_seconds, error) from error
            time.sleep(min(_pause_seconds(waited), left))
        else:
            return


def _unreachable(point: MeetingPoint, timeout_seconds: float, error: Exception) -> LaunchError:
    came = "" if point.starter_holds_store else "did rank 0 come? If it did, "
    return LaunchError(
        f"rank {point.rank} cannot reach {point.host} within {timeout_seconds:g} s"
        f" (sync.timeout_seconds): {came}check MASTER_ADDR, MASTER_PORT and the network"
        f" between nodes ({str(error).splitlines()[0]})"
    )


def of_this_attempt(store: Store, point: MeetingPoint) -> PrefixStore:
    """The part of the job's store in which no earlier attempt has left anything."""
    return PrefixStore(f"slipstream/attempt-{point.attempt}", store)


def meet_all(point: MeetingPoint, timeout_seconds: float) -> Store:
    """Connects, and returns the job's store once all ranks are here.

    Raises LaunchError where the store cannot be reached, else RankFailure that names the ranks that
    are missing ``timeout_seconds`` after this call, with the same words on all who came.
    """
    begin = time.monotonic()
    store = of_this_attempt(open_store(point, timeout_seconds), point)
    left = timeout_seconds - (time.monotonic() - begin)
    await_all(PrefixStore("join", store), point, timeout_seconds, left_seconds=left)
    return store


def await_all(
    store: Store,
    point: MeetingPoint,
    timeout_seconds: float,
    *,
    left_seconds: float | None = None,
) -> None:
    """Returns once all ranks have called this on ``store``, which serves one meeting.

    left_seconds: what is left of ``timeout_seconds``; None: all of it. Raises RankFailure that
    names those who did not come, with the same words on all who did; or the store's host, where
    that is gone.
    """
    left = timeout_seconds if left_seconds is None else left_seconds
    try:
        absent, limit = _answered(lambda: _arrive(store, point, timeout_seconds, left), left, point)
    except RuntimeError as error:
        raise RankFailure(
            f"rank {point.rank} lost {point.host}, where ranks meet, at the start of the job: it"
            " died; see what it printed"
        ) from error
    if not absent:
        return
    text = _not_here(absent, limit)
    if point.rank in absent:
        raise RankFailure(f"rank {point.rank} came when the others had given up: {text}")
    if point.is_host:
        _let_others_hear(store, point.world_size - len(absent))
    raise RankFailure(text)


def _arrive(
    store: Store, point: MeetingPoint, timeout_seconds: float, left_seconds: float
) -> tuple[list[int], float]:
    """The ranks that are missing, and after which time limit: what the first that can tell says."""
    begin = time.monotonic()

    def decide(absent: list[int]) -> None:
        store.compare_set(_VERDICT, "", json.dumps([absent, timeout_seconds]))

    if store.add(f"here/{point.rank}", 1) == 1 and store.add("here", 1) == point.world_size:
        decide([])
    while not store.check([_VERDICT]):
        waited = time.monotonic() - begin
        if waited > left_seconds:
            ranks = range(point.world_size)
            decide([rank for rank in ranks if not store.check([f"here/{rank}"])])
        time.sleep(min(_pause_seconds(waited), max(left_seconds - waited, 0.0)))
    absent, limit = json.loads(store.get(_VERDICT))
    if absent:
        store.add("heard", 1)
    return absent, limit


def _pause_seconds(waited_seconds: float) -> float:
    """How long to sleep between two looks: many ranks that wait for long should ask rarely."""
    return min(max(_SHORTEST_PAUSE_SECONDS, waited_seconds / 10), _LONGEST_PAUSE_SECONDS)


def _let_others_hear(store: Store, num_ranks: int) -> None:
    """Stay a little before failing: the store ends with this process."""
    end = time.monotonic() + HEAR_FAILURE_SECONDS
    while time.monotonic() < end and store.add("heard", 0) < num_ranks:
        time.sleep(0.05)


def _answered(action: Callable[[], Result], seconds: float, point: MeetingPoint) -> Result:
    """What ``action`` gives. Raises RankFailure when it is still going on well after its time.

    Calls of a store have no limit once its host is frozen, so they are made in a thread.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="slipstream-arrival", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0) + _ANSWER_SECONDS)
    if not outcome.done():
        raise RankFailure(
            f"{point.host}, where ranks meet, gives rank {point.rank} no answer: it is frozen, or"
            " the network is; see what it printed"
        )
    return outcome.result()


def _not_here(absent: Sequence[int], timeout_seconds: float) -> str:
    one = len(absent) == 1
    return (
        f"{'rank' if one else 'ranks'} {_listed(absent)} did not come to the start of the job"
        f" within {timeout_seconds:g} s (sync.timeout_seconds): {'it was' if one else 'they were'}"
        f" not started, died or froze; see what {'it' if one else 'they'} printed"
    )


def _listed(ranks: Sequence[int]) -> str:
    """Ranks in words: "1", "1 and 3", "1, 4 to 9 and 12"; ``ranks`` ascend."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
