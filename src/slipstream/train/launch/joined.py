"""Is this process a rank of a job that somebody else started? What torchrun and srun tell a rank.

Pure functions of the environment: nothing is contacted here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.cluster import Cluster
from slipstream.errors import LaunchError


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks of a job find each other: a store at an address, held by rank 0 or for all.

    ``attempt`` counts the starter's restarts: a store may outlive the ranks that wrote into it.
    """

    rank: int
    world_size: int
    address: str
    port: int
    starter_holds_store: bool
    attempt: int = 0

    @property
    def is_host(self) -> bool:
        """Whether this rank is the one that others connect to."""
        return self.rank == 0 and not self.starter_holds_store

    @property
    def host(self) -> str:
        """Who holds the store, in words."""
        holder = "the launcher" if self.starter_holds_store else "rank 0"
        return f"{holder} at {self.address}:{self.port}"


@dataclass(frozen=True)
class JoinedJob:
    """A rank's place in a job of torchrun or srun.

    ``ranks_per_node`` is empty where this rank knows only its own node's (torchrun on several
    nodes). ``variables`` are what ``env://`` initialisation needs and the starter did not set.
    """

    starter: str
    rank: int
    world_size: int
    local_rank: int
    node: int
    num_nodes: int
    local_world_size: int
    master_address: str
    master_port: int
    ranks_per_node: tuple[int, ...]
    variables: Mapping[str, str]
    starter_holds_store: bool
    attempt: int = 0

    @property
    def meeting_point(self) -> MeetingPoint:
        """Where the ranks of this job find each other."""
        return MeetingPoint(
            self.rank,
            self.world_size,
            self.master_address,
            self.master_port,
            self.starter_holds_store,
            self.attempt,
        )


def find_job(environ: Mapping[str, str]) -> JoinedJob | None:
    """The job around this process, or None where there is none and ranks are to be started here.

    A step of srun with a single task is no job: ``srun --pty bash`` is one. Raises LaunchError
    for a job whose variables are incomplete or contradict each other.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _srun(environ)
    return None


def find_meeting_point(environ: Mapping[str, str]) -> MeetingPoint:
    """Where the ranks of the job around this process meet, from the variables of ``env://``.

    Raises LaunchError for variables that are missing or contradict each other.
    """
    rank, world_size = _rank(environ)
    return MeetingPoint(
        rank,
        world_size,
        _text(environ, "MASTER_ADDR"),
        _number(environ, "MASTER_PORT"),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        _number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def shape(ranks_per_node: tuple[int, ...], nodes: int | None, per_node: int | None) -> Cluster:
    """The cluster of a joined job: as it is, or as ``--nodes`` and ``--per-node`` divide it.

    Raises LaunchError when they do not multiply to the job's world size.
    """
    world_size = sum(ranks_per_node)
    if nodes is None and per_node is None:
        return Cluster(ranks_per_node)
    if nodes is None:
        nodes = world_size // (per_node or 1)
    if per_node is None:
        per_node = world_size // nodes
    if nodes < 1 or per_node < 1 or nodes * per_node != world_size:
        raise LaunchError(
            f"--nodes {nodes} --per-node {per_node} make {nodes * per_node} ranks, but the job"
            f" has {world_size}: leave both out, or let them multiply to {world_size}"
        )
    return Cluster.regular(nodes, per_node)


def _torchrun(environ: Mapping[str, str]) -> JoinedJob:
    rank, world_size = _rank(environ)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", 1 if world_size == 1 else None)
    num_nodes = _number(environ, "GROUP_WORLD_SIZE", 1 if local_world_size == world_size else None)
    known = num_nodes == 1
    alone = world_size == 1
    return JoinedJob(
        starter="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", 0 if alone else None),
        node=_number(environ, "GROUP_RANK", 0 if known else None),
        num_nodes=num_nodes,
        local_world_size=local_world_size,
        master_address=_text(environ, "MASTER_ADDR", "127.0.0.1" if alone else None),
        master_port=_number(environ, "MASTER_PORT", 0 if alone else None),
        ranks_per_node=(world_size,) if known else (),
        variables={},
        starter_holds_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _srun(environ: Mapping[str, str]) -> JoinedJob:
    counts = tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE"))
    rank = _number(environ, "SLURM_PROCID")
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    if sum(counts) != world_size:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} does not add up"
            f" to SLURM_STEP_NUM_TASKS={world_size}"
        )
    cluster = Cluster(counts)
    node = cluster.node_of(rank)
    if node != _number(environ, "SLURM_NODEID"):
        raise LaunchError(
            "srun did not number its tasks node by node: start it with --distribution=block"
        )
    address = environ.get("MASTER_ADDR") or first_host(_text(environ, "SLURM_STEP_NODELIST"))
    port = _number(environ, "MASTER_PORT", _derived_port(environ))
    local_rank = _number(environ, "SLURM_LOCALID")
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(counts[node]),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    return JoinedJob(
        starter="srun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        node=node,
        num_nodes=len(counts),
        local_world_size=counts[node],
        master_address=address,
        master_port=port,
        ranks_per_node=counts,
        variables=variables,
        starter_holds_store=False,
    )


def _derived_port(environ: Mapping[str, str]) -> int:
    """A port that every rank of a step derives alike and two steps on one node hardly share."""
    job, step = _number(environ, "SLURM_JOB_ID", 0), _number(environ, "SLURM_STEP_ID", 0)
    return 15000 + (job * 31 + step) % 15000


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Slurm's short form written out: ``"2(x3),1"`` is (2, 2, 2, 1). Raises LaunchError."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text} cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``"gpu[003-007,9],login1"`` is ``gpu003``."""
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _rank(environ: Mapping[str, str]) -> tuple[int, int]:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK={rank} is not one of WORLD_SIZE={world_size} ranks")
    return rank, world_size


def _text(environ: Mapping[str, str], name: str, default: str | None = None) -> str:
    value = environ.get(name) or default
    if not value:
        raise LaunchError(
            f"this process looks like a rank of a job, but {name} is not set:"
            " start it with torchrun or srun, or unset RANK and WORLD_SIZE to start ranks here"
        )
    return value


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    value = _text(environ, name)
    if not value.isdecimal():
        raise LaunchError(f"{name}={value} must be a whole number")
    return int(value)
