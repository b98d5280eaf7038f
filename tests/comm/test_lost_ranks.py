"""Case 23: a process that is killed, frozen or interrupted is named on every other, in time."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from lost_ranks import Ended, Scenario, run

pytestmark = pytest.mark.processes

KILL, STOP, INTERRUPT = signal.SIGKILL, signal.SIGSTOP, signal.SIGINT
Ends = list[Ended]
LARGE = 4096  # squared, in float32: 64 MiB

SCENARIOS = [
    Scenario(KILL, "at first", (2, 2)),
    Scenario(STOP, "at first", (1, 1)),
    Scenario(KILL, "in the middle", (2, 2), side=LARGE),
    Scenario(STOP, "in the middle", (1, 1, 1), side=LARGE),
    Scenario(INTERRUPT, "in the middle", (2, 2), side=LARGE),
    Scenario(KILL, "in the middle", (1, 1), "native", side=LARGE),
    Scenario(KILL, "between steps", (1, 1, 1)),
    Scenario(STOP, "between steps", (2, 2), "ring"),
    Scenario(KILL, "across", (2, 2)),
    Scenario(STOP, "across", (2, 2)),
    Scenario(KILL, "across", (2, 2), pieces=True),
]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[Scenario, Future[Ends]]]:
    """How every scenario ends, two side by side: a frozen rank is mostly waited for."""
    folders = {s: tmp_path_factory.mktemp(f"scenario-{i}") for i, s in enumerate(SCENARIOS)}
    with ThreadPoolExecutor(2) as pool:
        yield {scenario: pool.submit(run, scenario, folder) for scenario, folder in folders.items()}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_survivors_end_in_time_and_name_the_lost_rank(
    scenario: Scenario, ends: Mapping[Scenario, Future[Ends]]
) -> None:
    *survivors, lost = ends[scenario].result()
    if scenario.by is INTERRUPT:
        assert (lost.kind, lost.code) == ("KeyboardInterrupt", 1)
    else:
        assert lost.code == (None if scenario.by is STOP else -scenario.by)
    for rank, end in enumerate(survivors):
        assert end.code == 1 and end.kind == "RankFailure", end
        assert f"Rank {rank} lost its peers while averaging bucket 0 of step" in end.text
        assert f"no answer from rank {scenario.victim}:" in end.text
