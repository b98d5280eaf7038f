"""All ranks at the start of a job, or the missing ones by number; ranks are threads here."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from slipstream.errors import LaunchError, RankFailure, SlipstreamError
from slipstream.train.launch import arrival
from slipstream.train.launch.arrival import await_all, meet_all, of_this_attempt, open_store
from slipstream.train.launch.joined import MeetingPoint

HERE = "127.0.0.1"
LONG_SECONDS = 60.0


def hosted(world_size: int, *, by_starter: bool = False) -> tuple[MeetingPoint, TCPStore]:
    """Rank 0's meeting point on a free port, and the store there; keep it."""
    free = MeetingPoint(0, world_size, HERE, 0, starter_holds_store=False)
    held = open_store(free, LONG_SECONDS)
    return replace(free, port=held.port, starter_holds_store=by_starter), held


def come(point: MeetingPoint, ranks: list[int], seconds: float) -> list[Future[None]]:
    """Only these ranks come, the first of them last, and that one waits so long; how each fared.

    So it does not matter how fast this machine is just now.
    """
    points = [replace(point, rank=rank) for rank in ranks]
    stores = [open_store(one, LONG_SECONDS) for one in points]
    with ThreadPoolExecutor(len(ranks)) as pool:
        others = [
            pool.submit(await_all, store, one, LONG_SECONDS)
            for one, store in zip(points[1:], stores[1:], strict=True)
        ]
        stores[0].wait([f"here/{rank}" for rank in ranks[1:]])
        return [pool.submit(await_all, stores[0], points[0], seconds), *others]


@pytest.mark.parametrize("by_starter", [False, True])
def test_all_ranks_get_one_store(by_starter: bool) -> None:
    point, _held = hosted(4, by_starter=by_starter)
    with ThreadPoolExecutor(4) as pool:
        points = [replace(point, rank=rank) for rank in range(4)]
        stores = list(pool.map(lambda one: meet_all(one, LONG_SECONDS), points))
    stores[3].set("said", "by rank 3")
    assert {store.get("said") for store in stores} == {b"by rank 3"}


@pytest.mark.parametrize("by_starter", [False, True])
@pytest.mark.parametrize("first", [0, 4])
def test_all_who_came_name_exactly_those_who_did_not(first: int, by_starter: bool) -> None:
    point, _held = hosted(5, by_starter=by_starter)
    errors = [one.exception() for one in come(point, [first, 2, 4 - first], 0.3)]
    assert {type(error) for error in errors} == {RankFailure}
    assert {str(error) for error in errors} == {
        "ranks 1 and 3 did not come to the start of the job within 0.3 s (sync.timeout_seconds):"
        " they were not started, died or froze; see what they printed"
    }


def test_one_missing_rank_is_one() -> None:
    point, _held = hosted(2)
    with pytest.raises(RankFailure) as caught:
        meet_all(point, 0.1)
    assert str(caught.value) == (
        "rank 1 did not come to the start of the job within 0.1 s (sync.timeout_seconds):"
        " it was not started, died or froze; see what it printed"
    )


def test_a_rank_that_comes_too_late_says_so() -> None:
    point, _held = hosted(2, by_starter=True)
    with pytest.raises(RankFailure, match=r"^rank 1 did not come"):
        meet_all(point, 0.1)
    with pytest.raises(
        RankFailure, match=r"^rank 1 came when the others had given up: rank 1 did not come"
    ):
        meet_all(replace(point, rank=1), LONG_SECONDS)


def test_a_rank_that_comes_twice_is_not_taken_for_another() -> None:
    point, _held = hosted(3)
    for error in [one.exception() for one in come(point, [0, 1, 1], 0.1)]:
        assert str(error).startswith("rank 2 did not come")


def test_a_restarted_job_does_not_see_who_came_before() -> None:
    point, held = hosted(2, by_starter=True)
    PrefixStore("join", of_this_attempt(held, point)).add("here/1", 1)
    with pytest.raises(RankFailure, match=r"^rank 1 did not come"):
        meet_all(replace(point, attempt=1), 0.1)


def test_the_host_stays_until_the_others_have_heard() -> None:
    point, held = hosted(4)
    heard: list[int] = []

    def host() -> None:
        with pytest.raises(RankFailure, match=r"^rank 3 did not come"):
            await_all(held, point, 0.1)
        heard.append(held.add("heard", 0))

    others = [replace(point, rank=rank) for rank in (1, 2)]
    with ThreadPoolExecutor(3) as pool:
        for other in others:
            pool.submit(await_all, open_store(other, LONG_SECONDS), other, LONG_SECONDS)
        held.wait(["here/1", "here/2"])
        pool.submit(host).result()
    assert heard == [3]


def test_the_host_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "HEAR_FAILURE_SECONDS", 0.2)
    point, held = hosted(3)
    held.add("here/1", 1)  # rank 1 came, and died
    with pytest.raises(RankFailure, match=r"^rank 2 did not come"):
        await_all(held, point, 0.1)
    assert held.add("heard", 0) == 1


def test_a_host_that_dies_while_others_wait_is_named() -> None:
    point, held = hosted(3)
    servers: list[Store] = [held]
    del held
    store = open_store(replace(point, rank=1), LONG_SECONDS)
    errors: list[SlipstreamError] = []

    def wait() -> None:
        with pytest.raises(RankFailure) as caught:
            await_all(store, replace(point, rank=1), LONG_SECONDS)
        errors.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    servers[0].wait(["here/1"])
    servers.clear()
    waiting.join(LONG_SECONDS)
    assert str(errors[0]).startswith(f"rank 1 lost rank 0 at {HERE}:{point.port}, where ranks meet")


@pytest.mark.parametrize(
    ("by_starter", "who"), [(False, "rank 0"), (True, "the launcher")], ids=["rank 0", "launcher"]
)
def test_a_host_that_does_not_answer_is_named_in_time(
    by_starter: bool, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen process still accepts: the system does it for it."""
    monkeypatch.setattr(arrival, "_ANSWER_SECONDS", 0.2)
    with socket.create_server((HERE, 0)) as frozen:
        port = frozen.getsockname()[1]
        point = MeetingPoint(1, 2, HERE, port, by_starter)
        with pytest.raises(RankFailure, match=f"{who} at {HERE}:{port}, .* gives rank 1 no answer"):
            meet_all(point, 0.3)


def test_a_host_that_never_came_is_named() -> None:
    port = hosted(2)[0].port
    with pytest.raises(LaunchError, match=rf"rank 1 cannot reach rank 0 at {HERE}:{port} within"):
        meet_all(MeetingPoint(1, 2, HERE, port, starter_holds_store=False), 0.5)


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ([1], "rank 1 did"),
        ([1, 2], "ranks 1 and 2 did"),
        ([0, 2, 5], "ranks 0, 2 and 5 did"),
        ([1, 4, 5, 6, 9], "ranks 1, 4 to 6 and 9 did"),
        (list(range(8, 64)), "ranks 8 to 63 did"),
    ],
)
def test_many_missing_ranks_fit_a_sentence(absent: list[int], words: str) -> None:
    assert arrival._not_here(absent, 60).startswith(f"{words} not come to the start of the job")
