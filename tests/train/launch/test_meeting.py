"""Ranks of a joined job telling each other about folder and data; ranks are threads here."""

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from slipstream.errors import DataError, LaunchError, RankFailure, RunFolderError
from slipstream.train.launch.joined import JoinedJob
from slipstream.train.launch.meeting import Meeting


def job(rank: int, shape: tuple[int, ...] = (2, 1), port: int = 0, known: bool = True) -> JoinedJob:
    first = [sum(shape[:node]) for node in range(len(shape))]
    node = max(node for node in range(len(shape)) if first[node] <= rank)
    return JoinedJob(
        starter="srun",
        rank=rank,
        world_size=sum(shape),
        local_rank=rank - first[node],
        node=node,
        num_nodes=len(shape),
        local_world_size=shape[node],
        master_address="127.0.0.1",
        master_port=port,
        ranks_per_node=shape if known else (),
        variables={},
        starter_holds_store=False,
    )


def meet(shape: tuple[int, ...] = (2, 1), known: bool = True, seconds: float = 10) -> list[Meeting]:
    """A meeting for every rank of that shape, on a free port."""
    host = Meeting(job(0, shape, known=known), seconds)
    others = [Meeting(job(rank, shape, host.port, known), seconds) for rank in range(1, sum(shape))]
    return [host, *others]


def on_all(meetings: list[Meeting], what: str, actions: dict[int, object]) -> list[Future[str]]:
    """Every rank asks rank 0 for text; ``actions`` hold a text or an error for a rank."""

    def action(rank: int) -> str:
        outcome = actions[rank]
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    with ThreadPoolExecutor(len(meetings)) as pool:
        return [
            pool.submit(getattr(meeting, what), "make the folder", lambda rank=rank: action(rank))
            for rank, meeting in enumerate(meetings)
        ]


def test_rank_zero_tells_all() -> None:
    answers = on_all(meet(), "from_rank_zero", {0: "runs/a:b"})
    assert [answer.result() for answer in answers] == ["runs/a:b"] * 3


def test_the_first_rank_of_each_node_tells_its_node() -> None:
    answers = on_all(meet((2, 2)), "from_first_of_node", {0: "here", 2: "there"})
    assert [answer.result() for answer in answers] == ["here", "here", "there", "there"]


def test_a_failure_of_rank_zero_is_everybodys() -> None:
    answers = on_all(meet(), "from_rank_zero", {0: RunFolderError("runs/a exists")})
    errors = [answer.exception() for answer in answers]
    assert [type(error) for error in errors] == [RunFolderError] * 3
    assert [str(error) for error in errors] == ["runs/a exists"] + ["rank 0: runs/a exists"] * 2


def test_a_failure_of_one_node_stays_there() -> None:
    actions = {0: "well", 2: DataError("truncated")}
    answers = on_all(meet((2, 2)), "from_first_of_node", actions)
    assert [answer.result() for answer in answers[:2]] == ["well", "well"]
    assert str(answers[3].exception()) == "rank 2: truncated"


def test_nodes_tell_how_many_ranks_they_have() -> None:
    meetings = meet((1, 3, 2), known=False)
    with ThreadPoolExecutor(6) as pool:
        shapes = list(pool.map(lambda meeting: meeting.ranks_per_node(), meetings))
    assert shapes == [(1, 3, 2)] * 6
    assert meet((2, 1), known=True)[1].ranks_per_node() == (2, 1)


def test_a_job_goes_on_when_all_have_come() -> None:
    meetings = meet()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda meeting: meeting.await_all(), meetings)) == [None] * 3
    assert on_all(meetings, "from_rank_zero", {0: "runs/a"})[2].result() == "runs/a"


def test_ranks_that_do_not_come_to_the_meeting_are_named() -> None:
    meetings = meet((2, 2), known=False, seconds=0.2)
    with ThreadPoolExecutor(2) as pool:
        came = [pool.submit(meetings[rank].await_all) for rank in (0, 2)]
    for one in came:
        assert type(one.exception()) is RankFailure
        assert str(one.exception()).startswith("ranks 1 and 3 did not come to the start of the job")


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    meetings = meet((2,), seconds=0.2)
    with pytest.raises(RankFailure, match=r"rank 0 did not come .* within 0\.2 s"):
        meetings[1].from_rank_zero("make the folder", lambda: "")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} .* is in use: set MASTER_PORT"):
            Meeting(job(0, port=port), 5)


def test_a_rank_zero_that_is_not_there_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(LaunchError, match=f"rank 1 cannot reach rank 0 at 127.0.0.1:{port} "):
            Meeting(job(1, port=port), 0.5)


def test_a_restarted_job_does_not_hear_the_attempt_before() -> None:
    host = Meeting(job(0, (2,)), 10)
    host.from_rank_zero("make the folder", lambda: "old")
    restarted = replace(job(1, (2,), host.port), attempt=1)
    with pytest.raises(RankFailure):
        Meeting(restarted, 0.2).from_rank_zero("make the folder", lambda: "")
