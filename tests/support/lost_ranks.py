"""Ranks as real processes of which one is killed, frozen or interrupted at a chosen moment.

Every rank trains by GradientSync; the survivors write down what they were told, and end with it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from slipstream.cluster import Cluster
from slipstream.plan import Bucket, Plan
from slipstream.wires import CollectiveName

LIMIT_SECONDS = 2.0
HANG_SECONDS = 30.0
"""A rank that has not ended by then hangs: its limits are a fraction of it."""
_POLL_SECONDS = 0.02
_PRELOADED = ["torch", "torch.distributed", "slipstream.sync", "slipstream.comm"]


@dataclass(frozen=True)
class Scenario:
    """What happens to the last rank, and when.

    by: the signal that it sends itself; when: "at first" (before its first average), "in the
    middle" of the second, "between steps", or "across" (when it first sends to another node);
    side: of the one square weight; pieces: collectives are made as over NCCL, in groups of their
    own.
    """

    by: signal.Signals
    when: str
    shape: tuple[int, ...]
    collective: CollectiveName = "torus"
    side: int = 64
    pieces: bool = False

    @property
    def victim(self) -> int:
        return sum(self.shape) - 1

    def __str__(self) -> str:
        kind = f"{self.collective}{' of pieces' if self.pieces else ''}"
        nodes = "+".join(map(str, self.shape))
        return f"{self.by.name} {self.when}, {kind}, {nodes}, {4 * self.side**2 >> 10} KiB"


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (None: frozen to the last), and what it was told."""

    code: int | None
    kind: str = ""
    text: str = ""


def run(scenario: Scenario, folder: Path) -> list[Ended]:
    """Every rank's end. Raises AssertionError where a survivor hangs; nobody is left behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ranks = [
        context.Process(target=_rank, args=(scenario, rank, str(folder)), daemon=True)
        for rank in range(sum(scenario.shape))
    ]
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + HANG_SECONDS
        while any(process.exitcode is None for process in ranks[: scenario.victim]):
            assert time.monotonic() < deadline, f"ranks hang: {[p.exitcode for p in ranks]}"
            time.sleep(_POLL_SECONDS)
        if scenario.by is not signal.SIGSTOP:
            ranks[scenario.victim].join(max(0.0, deadline - time.monotonic()))
        return [_ended(process.exitcode, folder / f"{r}.json") for r, process in enumerate(ranks)]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _ended(code: int | None, path: Path) -> Ended:
    told = json.loads(path.read_text()) if path.exists() else {}
    return Ended(code, **told)


def _rank(scenario: Scenario, rank: int, folder: str) -> None:
    """What a rank's process runs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what it raises is in its file
    try:
        _train(scenario, rank, folder)
    except BaseException as error:
        told = {"kind": type(error).__name__, "text": str(error)}
        Path(folder, f"{rank}.json").write_text(json.dumps(told))
        raise


def _train(scenario: Scenario, rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch._C._distributed_c10d import FileStore

    from slipstream.comm import peers
    from slipstream.sync import GradientSync

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    peers._REPORT_SECONDS = 1.0
    cluster, size = Cluster(scenario.shape), sum(scenario.shape)
    limit = timedelta(seconds=10 * LIMIT_SECONDS)  # the job's own; the gradients' is shorter
    store = FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    model = nn.Linear(scenario.side, scenario.side, bias=False)
    plan = Plan(
        planner="fixed",
        nodes=cluster.nodes,
        ranks_per_node=cluster.ranks_per_node,
        reduce=(
            Bucket(
                gradients=("weight",), bytes=model.weight.nbytes, collective=scenario.collective
            ),
        ),
    )
    with _as_over_nccl() if scenario.pieces else contextlib.nullcontext():
        sync = GradientSync(model, plan=plan, cluster=cluster, timeout_seconds=LIMIT_SECONDS)
    dist.barrier()
    fate = _Fate(scenario, cluster) if rank == scenario.victim else None
    for step in range(4):
        if fate is not None:
            fate.before_step(step)
        model.zero_grad()
        model(torch.ones(1, scenario.side)).sum().backward()
        expected = torch.ones(1)
        assert torch.equal(model.weight.grad.flatten()[:1], expected)  # type: ignore[union-attr]
    sync.close()


@contextlib.contextmanager
def _as_over_nccl() -> Iterator[None]:
    """Collectives are chosen as for a group of NCCL's, and run over Gloo."""
    with mock.patch("slipstream.comm.chosen.backend_of", lambda group, device: "nccl"):
        yield


class _Fate:
    """Sends the signal when its time has come."""

    def __init__(self, scenario: Scenario, cluster: Cluster) -> None:
        self._scenario, self._cluster = scenario, cluster
        self._step = -1

    def before_step(self, step: int) -> None:
        self._step = step
        when = self._scenario.when
        if when == "at first" and step == 0:
            self._strike()
        if when == "between steps" and step == 2:
            self._strike()
        if when == "in the middle" and step == 1:
            self._watch_messages(lambda team, member: True, after=3)
            if self._scenario.collective == "native":
                self._watch_native()
        if when == "across" and step == 0:
            self._watch_messages(self._leaves_node, after=0)
            self._watch_pieces()

    def _strike(self) -> None:
        os.kill(os.getpid(), self._scenario.by)

    def _leaves_node(self, team: Any, member: int) -> bool:
        nodes = {self._cluster.node_of(team.ranks[place]) for place in (team.index, member)}
        return len(nodes) > 1

    def _watch_messages(self, counts: Callable[[Any, int], bool], after: int) -> None:
        from slipstream.comm.teams import Team

        send, left = Team.send, [after]

        def watched(team: Any, tensor: Any, member: int, tag: int) -> Any:
            if counts(team, member):
                left[0] -= 1
                if left[0] == -1:
                    self._strike()
            return send(team, tensor, member, tag)

        Team.send = watched  # type: ignore[method-assign,assignment]

    def _watch_native(self) -> None:
        """Strikes while Gloo carries the average, for which it needs several times as long."""
        import threading

        from slipstream.comm.native import Native

        begin = Native.begin

        def watched(native: Any, flat: Any, divisor: int = 1) -> Any:
            work = begin(native, flat, divisor)
            threading.Timer(0.005, self._strike).start()
            return work

        Native.begin = watched  # type: ignore[method-assign,assignment]

    def _watch_pieces(self) -> None:
        from slipstream.comm.native import Native

        def struck(native: Any, flat: Any, divisor: int = 1) -> None:
            self._strike()

        if self._scenario.pieces:
            Native.sum_ = struck  # type: ignore[method-assign,assignment]
