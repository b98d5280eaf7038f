"""Collectives that do not come to their end: errors within the limit, and nothing left behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from ranks import Rank, run_ranks_settled
from slipstream.comm.hanging_up import hang_up
from slipstream.comm.peers import Peers
from slipstream.comm.teams import Team
from slipstream.errors import SlipstreamError
from slipstream.sync.channel import ThreadChannel
from ways import CPU, WAYS, Way, Ways

SHAPE = (2, 2)
LIMIT_SECONDS = 2.0
LOST = 3
LENGTH = 100_000


def summing_without_one(rank: Rank, way: Way, *, frozen: bool) -> None:
    """Rank 3 takes part once; then it ends, or stays without a word."""
    collective = Ways(rank).get(way, SHAPE)
    flat = torch.ones(LENGTH)
    collective.sum_(flat)
    if rank.rank == LOST:
        if frozen:
            rank.hold(6 * LIMIT_SECONDS)
        return
    for _ in range(3):  # the first may have been sent to the one that does not read it
        collective.sum_(flat)


def outcomes_of(way: Way, *, frozen: bool) -> list[Any]:
    return run_ranks_settled(
        lambda rank: summing_without_one(rank, way, frozen=frozen), 4, timeout_seconds=LIMIT_SECONDS
    )


@pytest.mark.parametrize("frozen", [False, True], ids=["ended", "frozen"])
def test_a_rank_that_is_lost_is_an_error_on_all_others_within_the_limit(frozen: bool) -> None:
    with ThreadPoolExecutor(len(WAYS)) as pool:  # all of them wait for the same time
        found = list(pool.map(lambda way: outcomes_of(way, frozen=frozen), WAYS))
    for way, outcomes in zip(WAYS, found, strict=True):
        assert outcomes[LOST] is None
        for outcome in outcomes[:LOST]:
            assert isinstance(outcome, RuntimeError), (str(way), outcomes)


def others_learn_at_once(rank: Rank, way: Way) -> str:
    """What the engine's way to tell of a failure says on a rank; rank 3 ends."""
    peers = Peers(rank.group, None, 60.0, CPU)
    try:
        summing_without_one(rank, way, frozen=False)
    except RuntimeError as error:
        return str(peers.failure(error, "summing"))
    return ""


@pytest.mark.parametrize("pieces", [False, True], ids=["messages", "pieces"])
def test_everybody_names_the_lost_rank_alone(pieces: bool) -> None:
    """Also those who never exchange a message with it, long before their own time is up."""
    ways = [way for way in WAYS if (way.wire, way.pieces) == ("float32", pieces)]

    def outcomes_of(way: Way) -> list[str]:
        return run_ranks_settled(
            lambda rank: others_learn_at_once(rank, way), 4, timeout_seconds=60.0
        )

    with ThreadPoolExecutor(len(ways)) as pool:
        for way, outcomes in zip(ways, pool.map(outcomes_of, ways), strict=True):
            for rank, text in enumerate(outcomes[:LOST]):
                assert f"Rank {rank} lost its peers while summing" in text, (str(way), outcomes)
                assert "no answer from rank 3:" in text, (str(way), outcomes)


class Failing:
    """Makes one thread's messages fail after the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        send, self.victim, self.left = Team.send, -1, 1

        def failing(team: Team, *message: Any) -> Any:
            if threading.get_ident() == self.victim:
                self.left -= 1
                if self.left < 0:
                    raise error
            return send(team, *message)

        monkeypatch.setattr(Team, "send", failing)


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()], ids=repr)
def test_a_ranks_own_error_ends_all_and_is_named(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, error)

    def body(rank: Rank) -> str:
        if rank.rank == 1:
            failing.victim = threading.get_ident()
        peers = Peers(rank.group, None, 60.0, CPU)
        collective = Ways(rank).get(Way("torus", "float32"), SHAPE)
        try:
            for _ in range(3):
                collective.sum_(torch.ones(LENGTH))
        except BaseException as caught:
            return str(peers.failure(caught, "summing"))
        return ""

    outcomes = run_ranks_settled(body, 4, timeout_seconds=20.0)
    words = type(error).__name__
    assert outcomes[1].startswith(f"Rank 1 cannot go on while summing: {words}"), outcomes
    for rank in (0, 2, 3):
        assert f"because of rank 1: {words}" in outcomes[rank], outcomes


def channel_threads() -> set[threading.Thread]:
    """Those of this process; engines that other tests broke may still have theirs."""
    return {t for t in threading.enumerate() if t.name.startswith("slipstream")}


def test_memory_and_threads_of_a_cancelled_collective_are_gone_and_its_channel_refuses() -> None:
    process, scratch = psutil.Process(), list[weakref.ref[Any]]()

    def body(rank: Rank, way: Way) -> list[BaseException]:
        collective: Any = Ways(rank).get(way, SHAPE)
        collective.sum_(torch.ones(1))
        if rank.rank == LOST:
            return []
        if hasattr(collective, "_scratch"):
            scratch.append(weakref.ref(collective._scratch))
        channel, errors = ThreadChannel(), list[BaseException]()
        flat = torch.ones(LENGTH)
        for _ in range(3):
            ticket = channel.submit(lambda: collective.sum_(flat))
            with pytest.raises((RuntimeError, SlipstreamError)) as caught:
                ticket.wait(4 * LIMIT_SECONDS)
            errors.append(caught.value.with_traceback(None))
            hang_up(rank.group)  # as the engine does: the others need not wait for their limit
        channel.close(LIMIT_SECONDS)
        return errors

    def scenario(way: Way) -> None:
        outcomes = run_ranks_settled(lambda rank: body(rank, way), 4, timeout_seconds=LIMIT_SECONDS)
        for errors in outcomes[:LOST]:
            assert isinstance(errors, list), (str(way), errors)
            assert errors[1] is errors[0] and errors[2] is errors[0], str(way)

    before, ours = process.num_threads(), channel_threads()
    for way in WAYS:
        if not way.pieces:
            scenario(way)
    deadline = time.monotonic() + 10.0
    while gc.collect() or process.num_threads() > before or any(ref() for ref in scratch):
        assert time.monotonic() < deadline, (process.num_threads(), before, scratch)
        time.sleep(0.02)
    assert scratch
    assert channel_threads() <= ours
