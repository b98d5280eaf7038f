"""The command as one torchrun job: what each of its processes is told, and how it is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slipstream.errors import LabError
from slipstream.lab.network import Network
from slipstream.lab.settings import INTERFACE, MASTER_PORT, LabSettings, node_name

_NO_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
_SLURM = "SLURM_"
_TORCHRUN_OPTION = "PET_"


@dataclass(frozen=True)
class Start:
    """A process to start: a rank, or a node's agent (``rank`` is then the node's first)."""

    node: int
    rank: int
    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def log_name(self) -> str | None:
        """The file it prints to, of the folder of logs; None where that is the lab's own output."""
        return f"{self.name}.log" if self.rank else None


@dataclass(frozen=True)
class Member:
    """A process of the job that was started, and the file it prints to (None: the lab's own)."""

    start: Start
    process: subprocess.Popen[bytes]
    log: Path | None


def plan_starts(settings: LabSettings, environment: Mapping[str, str]) -> list[Start]:
    """Every process of the job, in order of ranks.

    Raises LabError when the command is not found.
    """
    shared = _shared_environment(settings, environment)
    command = _found(settings.command, shared["PATH"])
    run_id = uuid.uuid4().hex
    if settings.agents:
        nodes = range(settings.nodes)
        return [_agent(settings, node, command, shared, run_id) for node in nodes]
    ranks = range(settings.cluster.world_size)
    return [_rank(settings, rank, command, shared, run_id) for rank in ranks]


def start_members(
    network: Network, starts: list[Start], logs: Path, *, overwrite: bool
) -> Iterator[Member]:
    """Start the processes on their nodes, one after the other.

    The first prints where this process does, the others to files in ``logs``, which are new unless
    ``overwrite``. Nobody reads standard input. Raises LabError when one cannot be started.
    """
    for start in starts:
        log = None if start.log_name is None else logs / start.log_name
        output = None if log is None else _opened(log, overwrite)
        try:
            with network.entered(start.node):
                process = subprocess.Popen(
                    start.arguments,
                    env=dict(start.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=None if output is None else subprocess.STDOUT,
                )
        except OSError as error:
            raise LabError(f"{start.arguments[0]} cannot be started: {error.strerror}") from error
        finally:
            if output is not None:
                output.close()
        yield Member(start, process, log)


def _opened(log: Path, overwrite: bool) -> BinaryIO:
    try:
        return log.open("wb" if overwrite else "xb")
    except OSError as error:
        raise LabError(
            f"{log} cannot be written ({error.strerror}); choose another --logs"
        ) from error


def search_path(environment: Mapping[str, str]) -> str:
    """Where commands are looked for: beside this Python first, so that its own are found."""
    beside = os.path.dirname(sys.executable)
    rest = environment.get("PATH", os.defpath)
    return rest if beside in rest.split(os.pathsep)[:1] else beside + os.pathsep + rest


def _found(command: tuple[str, ...], path: str) -> tuple[str, ...]:
    """The command with its program's place; a Python file is run by this Python, as by torchrun."""
    program = command[0]
    if program.endswith(".py") and os.path.isfile(program):
        return (sys.executable, *command)
    place = shutil.which(program, path=path)
    if place is None:
        raise LabError(f"command {program} is neither on the PATH nor beside {sys.executable}")
    return (place, *command[1:])


def _shared_environment(settings: LabSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """What all processes of the job are told, on top of this process's environment."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith((_SLURM, _TORCHRUN_OPTION)) and name not in _NO_RANK
    }
    cores = len(os.sched_getaffinity(0))
    return {
        # All nodes share the cores of this machine.
        "OMP_NUM_THREADS": str(max(1, cores // settings.cluster.world_size)),
        **kept,
        "PATH": search_path(environment),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
    }


def _rank(
    settings: LabSettings,
    rank: int,
    command: tuple[str, ...],
    shared: Mapping[str, str],
    run_id: str,
) -> Start:
    """A rank with the variables that torchrun gives it; rank 0 holds the store."""
    cluster = settings.cluster
    node = cluster.node_of(rank)
    told = {
        "RANK": rank,
        "WORLD_SIZE": cluster.world_size,
        "LOCAL_RANK": cluster.local_rank_of(rank),
        "LOCAL_WORLD_SIZE": settings.ranks_per_node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": settings.nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": cluster.world_size,
        "MASTER_ADDR": settings.master_address,
        "MASTER_PORT": MASTER_PORT,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    variables = {name: str(value) for name, value in told.items()}
    return Start(node, rank, f"rank-{rank}", command, {**shared, **variables})


def _agent(
    settings: LabSettings,
    node: int,
    command: tuple[str, ...],
    shared: Mapping[str, str],
    run_id: str,
) -> Start:
    """torchrun itself on a node, told what one tells it on each machine of a real cluster."""
    options = {
        "nnodes": settings.nodes,
        "node-rank": node,
        "nproc-per-node": settings.ranks_per_node,
        "rdzv-backend": "static",
        "rdzv-id": run_id,
        "master-addr": settings.master_address,
        "master-port": MASTER_PORT,
    }
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    arguments = (*torchrun, *(f"--{name}={value}" for name, value in options.items()))
    return Start(
        node,
        settings.cluster.ranks_of_node(node).start,
        node_name(node),
        (*arguments, "--no-python", *command),
        shared,
    )
