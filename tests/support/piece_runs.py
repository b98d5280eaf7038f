"""What ranks do in the tests of collectives that are made of a backend's own pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from slipstream.cluster import Cluster
from slipstream.comm import Collectives
from slipstream.errors import PlanError
from slipstream.plan import Bucket, Plan
from slipstream.sync import GradientSync
from small_models import batch, gradients, loss_of, mlp
from ways import OF_PIECES, Way

TRAINED_ON = Cluster((2, 2))
GPU_LENGTHS = [0, 1, 2, 7, 1025, 300_001]


@contextlib.contextmanager
def as_over_nccl() -> Iterator[None]:
    """Collectives are chosen as for a group of NCCL's, and run over Gloo."""
    with mock.patch("slipstream.comm.chosen.backend_of", lambda group, device: "nccl"):
        yield


def train_by_pieces(rank: int, _world_size: int) -> dict[str, Any]:
    """Averages of one backward by every way, and what was left of groups and refused."""
    found: dict[str, Any] = {}
    for way in OF_PIECES:
        model = mlp()
        with as_over_nccl():
            sync = GradientSync(model, plan=plan_of(way), cluster=TRAINED_ON, timeout_seconds=20.0)
        loss_of(model, batch(rank)).backward()
        found[str(way)] = gradients(model)
        sync.close()
    found["half"] = told_of_half_the_job(rank)
    found["limit"] = limit_of_subgroups(rank)
    return found


def told_of_half_the_job(rank: int) -> str:
    """What a group over some ranks of the job is told when it asks for groups within it."""
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    collectives = Collectives(halves[rank // 2], Cluster((1, 1)))  # type: ignore[arg-type]
    three = dist.new_group([0, 1, 2])
    cluster_of_three = Collectives(three, Cluster((2, 1))) if rank < 3 else None  # type: ignore[arg-type]
    with as_over_nccl():
        flat = torch.full((5,), float(rank))
        collectives.get("torus").sum_(flat)  # all of its teams are its own
        assert flat.tolist() == [1.0 if rank < 2 else 5.0] * 5
        try:
            if cluster_of_three is not None:
                cluster_of_three.get("hierarchical")
        except PlanError as error:
            return str(error)
    return ""


def limit_of_subgroups(rank: int) -> list[float]:
    """The time limits of the groups that a torus makes, which are then ended."""
    parent = dist.new_group(timeout=timedelta(seconds=17))
    collectives = Collectives(parent, TRAINED_ON)  # type: ignore[arg-type]
    with as_over_nccl():
        collectives.get("torus")
    made = [group for group in collectives._subgroups._made.values() if group is not None]
    limits = [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in made
    ]
    sizes = [float(group.size()) for group in made]
    collectives.close()
    for group in made:
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError):
            continue
        raise AssertionError("a group is left")
    return limits + sizes


def plan_of(way: Way) -> Plan:
    """One bucket a parameter."""
    buckets = tuple(
        Bucket.model_validate(
            {"gradients": (n,), "bytes": p.nbytes, "collective": way.name, "wire": way.wire}
        )
        for n, p in reversed(list(mlp().named_parameters()))
    )
    nodes, ranks = TRAINED_ON.nodes, TRAINED_ON.ranks_per_node
    return Plan(planner="fixed", nodes=nodes, ranks_per_node=ranks, reduce=buckets)


def sum_on_cards(rank: int, world_size: int) -> dict[str, Any]:
    """Sums over NCCL by every way on every regular shape; one card a rank."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for nodes in (n for n in range(1, world_size + 1) if world_size % n == 0):
        cluster = Cluster.regular(nodes, world_size // nodes)
        collectives = Collectives(group, cluster, device)  # type: ignore[arg-type]
        for way in OF_PIECES:
            collective = collectives.get(way.name, way.wire)
            collective.sum_(torch.ones(1, device=device))  # NCCL connects, which may wait
            torch.cuda.synchronize(device)
            for length in GPU_LENGTHS:
                flat = whole_numbers(rank, length).to(device)
                torch.cuda.set_sync_debug_mode("error")  # nothing may wait on the host
                collective.sum_(flat, world_size)
                torch.cuda.set_sync_debug_mode("default")
                found[f"{nodes} {way} {length}"] = flat.cpu()
        collectives.close()
    dist.barrier()
    return found


def whole_numbers(rank: int, length: int) -> torch.Tensor:
    """Multiples of 8 whose sums are exact in 16 bits, and whose means are for up to 8 ranks."""
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return 8 * torch.randint(-3, 4, (length,), generator=generator).float()
