"""Small agreements between ranks, broadcast, and the names of those that are lost."""

from __future__ import annotations

import threading

import pytest
import torch

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.comm import Alone, Native
from slipstream.comm.peers import Peers
from slipstream.errors import RankFailure, SlipstreamError

CPU = torch.device("cpu")


def peers_of(rank: Rank, timeout_seconds: float = 5.0) -> Peers:
    return Peers(rank.group, None, timeout_seconds, CPU)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_gathering_gives_everyone_everything_in_rank_order(world_size: int) -> None:
    def gather(rank: Rank) -> list[object]:
        return peers_of(rank).gather({"rank": rank.rank, "text": "é" * rank.rank}, "testing")

    expected = [{"rank": r, "text": "é" * r} for r in range(world_size)]
    assert run_ranks(gather, world_size) == [expected] * world_size


def test_broadcast_overwrites_tensors_of_every_dtype_and_layout() -> None:
    def broadcast(rank: Rank) -> list[torch.Tensor]:
        tensors = [
            torch.full((2, 3), float(rank.rank)),
            torch.full((3, 2), rank.rank).t(),
            torch.tensor(rank.rank == 0),
            torch.empty(0, 8),
            torch.full((2,), 1j * (rank.rank + 1)),
            torch.full((1, 4, 2, 2), rank.rank + 0.5).to(memory_format=torch.channels_last),
            torch.full((3,), rank.rank + 1, dtype=torch.bfloat16),
        ]
        peers_of(rank).broadcast({str(i): t for i, t in enumerate(tensors)}, "testing")
        return tensors

    zero, one = run_ranks(broadcast, 2)
    for mine, expected in zip(one, zero, strict=True):
        assert torch.equal(mine, expected)
    assert bool(one[2]) and one[5].stride() == (16, 1, 8, 4)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_native_averages_to_the_same_bits_everywhere(dtype: torch.dtype) -> None:
    def average(rank: Rank) -> torch.Tensor:
        flat = torch.arange(37, dtype=torch.float64).mul(0.1 * (rank.rank + 1)).to(dtype)
        Native(rank.group).sum_(flat, rank.world_size)
        return flat

    outcomes = run_ranks(average, 3)
    assert all(torch.equal(mine, outcomes[0]) for mine in outcomes)
    exact = torch.arange(37, dtype=torch.float64).mul(0.2)
    torch.testing.assert_close(outcomes[0].double(), exact, rtol=1e-2, atol=1e-12)


def test_sixteen_bit_sums_are_formed_in_thirty_two_bits() -> None:
    """Case 28's kind: 40,000 on each of 4 ranks overflows float16 when it is summed there."""

    def average(rank: Rank) -> float:
        flat = torch.full((8,), 40_000.0, dtype=torch.float16)
        Native(rank.group).sum_(flat, rank.world_size)
        return float(flat[0])

    assert run_ranks(average, 4) == [40_000.0] * 4


def test_alone_changes_nothing() -> None:
    flat = torch.arange(4.0)
    Alone().sum_(flat)
    assert torch.equal(flat, torch.arange(4.0))


def test_an_agreement_by_store_leaves_out_those_who_do_not_come() -> None:
    def agree(rank: Rank) -> dict[int, object]:
        if rank.rank == 2:
            return {}
        return peers_of(rank, timeout_seconds=0.3).gather_by_store("key", rank.rank * 10)

    assert run_ranks(agree, 3)[:2] == [{0: 0, 1: 10}] * 2


def test_a_failure_names_the_silent_and_cites_those_who_know() -> None:
    def fail(rank: Rank) -> str:
        peers = peers_of(rank)
        if rank.rank == 2:
            peers.post_failure("the disk is full", "saving", cause=True)
            return ""
        if rank.rank == 3:
            return ""
        return str(peers.failure(RuntimeError("Connection closed"), "averaging"))

    zero, one, *_ = run_ranks(fail, 4)
    assert "because of rank 2: the disk is full" in zero
    assert "because of rank 2: the disk is full" in one


@pytest.mark.usefixtures("brief_reports")
def test_a_wait_without_end_is_explained_and_an_explanation_is_not_explained_again() -> None:
    """A group whose own limit is longer than the engine's: the backend has not said anything."""

    def fail(rank: Rank) -> str:
        if rank.rank == 1:
            return ""
        peers = peers_of(rank)
        first = peers.failure(RankFailure("A collective has not ended within 1 s."), "averaging")
        assert peers.failure(first, "saving") is first
        return str(first)

    zero, _, two = run_ranks(fail, 3)
    for rank, text in ((0, zero), (2, two)):
        assert text == (
            f"Rank {rank} lost its peers while averaging (limit 5 s); no answer from rank 1: it "
            "died, froze or never came to this point; look at its own log; the backend said: A "
            "collective has not ended within 1 s."
        )


def test_who_says_more_than_that_a_connection_broke_is_cited() -> None:
    """Backends and torch's allocator raise the same kind of error."""
    said = ["Connection closed by peer", "DefaultCPUAllocator: can't allocate memory", "Timed out"]

    def fail(rank: Rank) -> str:
        return str(peers_of(rank).failure(RuntimeError(said[rank.rank]), "averaging"))

    zero, one, two = run_ranks(fail, 3)
    for text in (zero, two):
        assert "rank 1 said: DefaultCPUAllocator: can't allocate memory" in text
        assert "no answer" not in text and text.count(" said: ") == 2
    assert "rank 0" not in one and "rank 2" not in one


def test_a_failure_of_ones_own_is_no_loss_of_peers() -> None:
    def fail(rank: Rank) -> SlipstreamError:
        if rank.rank == 0:
            return peers_of(rank).failure(MemoryError("no memory"), "summing")
        return peers_of(rank).failure(RuntimeError("Connection closed"), "summing")

    zero, one = run_ranks_settled(fail, 2)
    assert isinstance(zero, SlipstreamError) and not isinstance(zero, RankFailure)
    assert str(zero) == "Rank 0 cannot go on while summing: MemoryError: no memory"
    assert str(one).endswith("because of rank 0: MemoryError: no memory")


def test_who_fails_hangs_up_so_that_nobody_waits_for_it() -> None:
    """Rank 2 waits for rank 1 alone, which fails because rank 0 is gone."""

    def body(rank: Rank) -> str:
        if rank.rank == 0:
            return ""
        waited_for = rank.rank - 1
        try:
            rank.group.recv([torch.zeros(1)], waited_for, 0).wait()
        except RuntimeError as error:
            return str(peers_of(rank, 60.0).failure(error, "waiting"))
        return ""

    _, one, two = run_ranks(body, 3, timeout_seconds=60.0)
    for text in (one, two):
        assert "no answer from rank 0:" in text


def test_a_failure_tells_where_the_others_were() -> None:
    def fail(rank: Rank) -> str:
        if rank.rank == 2:
            return ""
        doing = "averaging bucket 0 of step 3" if rank.rank == 0 else "evaluating"
        return str(peers_of(rank).failure(RuntimeError("timed out\nstack"), doing))

    zero, one, _ = run_ranks(fail, 3)
    assert "no answer from rank 2" in zero and "no answer from rank 2" in one
    assert "rank 1 was evaluating" in zero and "averaging bucket 0 of step 3" in one
    assert "timed out" in zero and "stack" not in zero


def test_a_lost_store_is_named_as_such() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection refused")

    def fail(rank: Rank) -> str:
        peers = Peers(rank.group, Gone(), 5.0, CPU)  # type: ignore[arg-type]
        return str(peers.failure(RuntimeError("closed"), "averaging"))

    for text in run_ranks(fail, 2):
        assert "the store through which ranks find each other no longer answers" in text


def test_a_store_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is cut off: its calls block for ever, and hold the client's lock meanwhile."""
    for limit in ("_REPORT_SECONDS", "_STORE_SECONDS"):
        monkeypatch.setattr(f"slipstream.comm.peers.{limit}", 0.1)
    lock, never = threading.Lock(), threading.Event()

    class CutOff:
        def set(self, key: str, value: str) -> None:
            with lock:
                never.wait(20.0)
            raise RuntimeError("connection lost")

    def fail(rank: Rank) -> str:
        peers = Peers(rank.group, CutOff(), 0.1, CPU)  # type: ignore[arg-type]
        text = str(peers.failure(RuntimeError("closed"), "averaging"))
        peers.post_failure("own", "averaging", cause=True)
        assert peers.gather_by_store("key", 1) == {}
        return text

    for text in run_ranks(fail, 2, timeout_seconds=3.0):
        assert "no longer answers" in text
    never.set()


@pytest.mark.usefixtures("brief_reports")
def test_a_rank_that_is_gone_is_an_error_within_the_limit() -> None:
    def gather(rank: Rank) -> None:
        if rank.rank == 1:
            rank.hold(8.0)
        else:
            peers_of(rank, 1.0).gather(1, "agreeing on lunch")

    zero, _ = run_ranks_settled(gather, 2, timeout_seconds=1.0)
    assert isinstance(zero, RankFailure)
    assert "while agreeing on lunch" in str(zero) and "no answer from rank 1" in str(zero)
