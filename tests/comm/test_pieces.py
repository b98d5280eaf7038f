"""Collectives of a backend's own pieces: chosen on NCCL, in groups made by all ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piece_runs import GPU_LENGTHS, sum_on_cards, train_by_pieces, whole_numbers
from processes import run_processes
from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.comm import Collectives
from slipstream.comm.flat import Flat
from slipstream.comm.pieces import PIECES, DirectPieces, TorusPieces
from slipstream.comm.subgroups import Subgroups
from slipstream.errors import PlanError, RankFailure
from small_models import assert_matches, batch, gradients, loss_of, mlp
from ways import CPU, OF_PIECES

NCCL = torch.device("cuda")


class Group:
    """As much of a process group as choosing looks at: its backends, by device."""

    def __init__(self, backends: dict[torch.device, str]) -> None:
        self._backends = backends
        self._device_types = list(backends)

    def _get_backend(self, device: torch.device) -> Any:
        class Backend:
            def name(self, found: str = self._backends[device]) -> str:
                return found

        return Backend()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 4


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "recursive_doubling"])
def test_what_nccl_does_by_itself_is_refused_there(name: str) -> None:
    group: Any = Group({NCCL: "nccl"})
    with pytest.raises(PlanError) as caught:
        Collectives(group, Cluster((2, 2))).get(name)
    assert str(caught.value) == (
        f"There is no collective {name!r} over NCCL: its own all-reduce, 'native', takes a ring or "
        "a tree as suits the size. Plan with 'native' or with direct or hierarchical or torus."
    )
    assert Collectives(group, Cluster((2, 2))).get("native").name == "native"


@pytest.mark.parametrize(("backend", "device"), [("gloo", NCCL), ("mpi", CPU)])
def test_other_backends_have_only_their_own_all_reduce(backend: str, device: torch.device) -> None:
    group: Any = Group({device: backend})
    with pytest.raises(PlanError, match=f"this group has {backend} on {device.type}; plan with"):
        Collectives(group, Cluster((2, 2))).get("direct")


def test_a_group_with_two_backends_is_used_by_that_of_the_tensors() -> None:
    group: Any = Group({CPU: "gloo", NCCL: "nccl"})
    assert isinstance(Collectives(group, Cluster((4,))).get("direct"), Flat)
    assert isinstance(Collectives(group, Cluster((4,)), CPU).get("direct"), Flat)
    assert isinstance(Collectives(group, Cluster((4,)), NCCL).get("direct"), DirectPieces)
    with pytest.raises(PlanError, match="no collective 'ring' over NCCL"):
        Collectives(group, Cluster((4,)), NCCL).get("ring")


def test_teams_that_are_everybody_or_nobody_else_take_no_group() -> None:
    def never(team: object) -> None:
        raise AssertionError(f"{team} needs no group")

    group: Any = Group({NCCL: "nccl"})
    for shape in ((4,), (1, 1, 1, 1)):
        for name in PIECES:
            found = Collectives(group, Cluster(shape), make=never).get(name)
            assert (found.name, found.wire) == (name, "float32")


def test_a_group_that_cannot_be_made_names_who_belongs_to_it() -> None:
    def body(rank: Rank) -> None:
        def fails(team: object) -> None:
            raise RuntimeError("wait timeout after 1000ms\nstack")

        with pytest.raises(RankFailure, match=r"group of ranks 0, 1 that.*\(wait timeout after"):
            TorusPieces(Subgroups(rank.group, CPU, fails), Cluster((2, 2)))

    run_ranks(body, 4)


@pytest.mark.processes
def test_the_engine_averages_by_pieces_in_groups_of_torchs(tmp_path: Path) -> None:
    outcomes = run_processes(train_by_pieces, 4, tmp_path, limit_seconds=60.0)
    reference = mlp()
    loss_of(reference, torch.cat([batch(rank) for rank in range(4)])).backward()
    rtol = {"float32": 1e-12, "bfloat16": 2**-6, "float16": 2**-9}
    for way in OF_PIECES:
        for found in outcomes:
            assert_matches(found[str(way)], gradients(reference), rtol=rtol[way.wire])
            assert_matches(found[str(way)], outcomes[0][str(way)], rtol=0.0)
    for found in outcomes[:3]:
        assert "this group has 3 ranks and the job 4" in found["half"]
    for found in outcomes:
        assert found["limit"] == [17.0, 17.0, 2.0, 2.0], "a node's and one across"


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sums_over_nccl_are_exact_and_nothing_waits_on_the_host(tmp_path: Path) -> None:
    """On every card there is, up to 8; with one alone the pieces are those of a world of one."""
    ranks = min(8, torch.cuda.device_count())
    outcomes = run_processes(sum_on_cards, ranks, tmp_path, limit_seconds=110.0)
    for case, expected in outcomes[0].items():
        length = int(case.split()[-1])
        assert length in GPU_LENGTHS
        mean = torch.stack([whole_numbers(rank, length) for rank in range(ranks)]).mean(0)
        if ranks in (1, 2, 4, 8) or "float32" in case:
            torch.testing.assert_close(expected, mean, rtol=1e-6, atol=0.0, msg=case)
        for found in outcomes:
            assert torch.equal(found[case], expected), case
