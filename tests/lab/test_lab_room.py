"""How many ranks a lab may have, before any of them starts."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import psutil
import pytest

from slipstream.errors import LabError
from slipstream.lab import LabSettings, run_lab
from slipstream.lab.room import LEAST_RANK_BYTES, Limit, machine_limits, refuse_too_many

HUNDRED_RANKS = LabSettings(10, 10, 1e9, ("true",))


def test_the_smallest_limit_holds_and_is_named() -> None:
    wide, narrow = Limit(1000, "the first is wide"), Limit(99, "the second is narrow")
    refuse_too_many(HUNDRED_RANKS, [wide, Limit(100, "just enough")])
    said = (
        "--nodes 10 with --per-node 10 takes 100 processes, and this machine has room for 99"
        r" \(the second is narrow\): use fewer nodes or ranks"
    )
    with pytest.raises(LabError, match=said):
        refuse_too_many(HUNDRED_RANKS, [wide, narrow])


def test_agents_of_torchrun_are_processes_too() -> None:
    with_agents = LabSettings(10, 10, 1e9, ("true",), agents=True)
    refuse_too_many(with_agents, [Limit(110, "enough")])
    with pytest.raises(LabError, match="takes 110 processes"):
        refuse_too_many(with_agents, [Limit(109, "not enough")])


def test_free_memory_and_open_files_are_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=50 * LEAST_RANK_BYTES + 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    memory = machine_limits(10)[0]
    assert memory == Limit(50, "500 MiB of memory are free, 10.0 MiB a rank")
    with pytest.raises(LabError, match=r"has room for 50 .*500 MiB of memory are free"):
        run_lab(HUNDRED_RANKS)
    limits = {resource.RLIMIT_NOFILE: 200, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    found = machine_limits(10)
    assert found[-1] == Limit(200 - 32 - 20, "`ulimit -n` is 200")
    assert not any("ulimit -u" in limit.because for limit in found)


def test_this_machine_has_room_for_a_small_lab() -> None:
    settings = LabSettings(2, 2, 1e9, ("true",))
    assert min(limit.processes for limit in machine_limits(2)) >= settings.nodes * 2
    refuse_too_many(settings)
