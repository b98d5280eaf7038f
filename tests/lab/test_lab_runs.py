"""Labs that really run: places, rates, counters, exit codes, cut links, and a job of torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab_process import QUICK, RunLab, python
from lab_scripts import ALL_REDUCE, HEARTBEAT, PLACE, TRANSFER, TRANSFER_BYTES

pytestmark = pytest.mark.processes

BURST_BYTES = 2**18
MBIT_100 = 100e6


def test_ranks_find_themselves_on_nodes_of_their_own(lab: RunLab, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    arguments = ("--nodes", "2", "--per-node", "2", "--logs", str(logs), *QUICK)
    run = lab(*arguments, *python(PLACE, tmp_path), PATH="/usr/bin:/bin")
    assert (run.exit_code, run.stdout) == (0, "rank 0\n"), run.stderr
    places = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [place["GROUP_RANK"] for place in places] == ["0", "0", "1", "1"]
    assert [place["host"] for place in places] == ["node0", "node0", "node1", "node1"]
    assert [place["address"] for place in places] == ["10.77.0.1"] * 2 + ["10.77.0.2"] * 2
    assert all(place["interfaces"] == ["lo", "slip0"] for place in places)
    assert {path.name: path.read_text() for path in logs.iterdir()} == {
        f"rank-{rank}.log": f"rank {rank}\n" for rank in (1, 2, 3)
    }


def test_logs_of_an_earlier_run_stay_unless_they_may_go(lab: RunLab, tmp_path: Path) -> None:
    log, arguments = tmp_path / "rank-1.log", ("--nodes", "2", "--logs", str(tmp_path), *QUICK)
    log.write_text("of the first run")
    run = lab(*arguments, *python("print('again')"))
    assert (run.exit_code, run.stdout, run.stderr.count("\n")) == (1, "", 1)
    assert f"{log} exists and was not overwritten; choose another --logs, or" in run.stderr
    assert log.read_text() == "of the first run"
    run = lab("--overwrite", *arguments, *python("print('again')"))
    assert run.exit_code == 0, run.stderr
    assert log.read_text() == "again\n"


def test_links_run_at_their_rate_and_count_what_passes(lab: RunLab, tmp_path: Path) -> None:
    run = lab("--nodes", "2", "--rate", "100mbit", "--json", *python(TRANSFER, tmp_path))
    assert run.exit_code == 0, run.stderr
    result, check = run.result, run.result["check"]
    slowest = min(check["together_bits_per_second"])
    assert 0.95 <= slowest / MBIT_100 <= 1.05 or check["cpu_bound"]
    assert "plain streams from all nodes at once reach" in run.stderr
    assert ("CPU-bound" in run.stderr) == bool(check["cpu_bound"])
    # Not faster than the rate, but for what the token buckets at both ends of a link held.
    seconds = float((tmp_path / "seconds").read_text())
    assert seconds > (TRANSFER_BYTES - 2 * BURST_BYTES) * 8 / MBIT_100
    assert TRANSFER_BYTES < result["sent_bytes"][1] < 1.02 * TRANSFER_BYTES
    assert result["received_bytes"][0] == result["sent_bytes"][1]
    assert result["received_bytes"][1] == result["sent_bytes"][0] < 0.02 * TRANSFER_BYTES


def test_ranks_of_a_node_have_a_rate_of_their_own(lab: RunLab, tmp_path: Path) -> None:
    arguments = ("--nodes", "1", "--per-node", "2", "--rate", "1gbit", "--intra-rate", "100mbit")
    run = lab(*arguments, "--json", *python(TRANSFER, tmp_path))
    assert run.exit_code == 0, run.stderr
    seconds = float((tmp_path / "seconds").read_text())
    assert seconds > (TRANSFER_BYTES - BURST_BYTES) * 8 / MBIT_100
    assert run.result["sent_bytes"] == [0]
    assert run.result["intra_rate_bits_per_second"] == MBIT_100
    assert run.result["check"] is None
    check = run.result["intra_check"]
    assert 0.95 <= check["together_bits_per_second"][0] / MBIT_100 <= 1.05 or check["cpu_bound"]


def test_the_first_failure_is_named_and_its_exit_code_passed_on(lab: RunLab) -> None:
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '2': sys.exit('rank two gives up')\n"
        "if os.environ['RANK'] == '3': time.sleep(600)\n"
        "time.sleep(600)"
    )
    arguments = ("--nodes", "2", "--per-node", "2", "--grace", "300ms", "--json", *QUICK)
    run = lab(*arguments, *python(script))
    assert run.exit_code == 1
    assert run.result["failure"] == {"node": 1, "rank": 2, "exit_code": 1}
    assert "lab: rank 2 on node1 ended with exit code 1" in run.stderr
    assert "lab: rank 2 on node1 printed last:\nrank two gives up" in run.stderr
    assert "rank 0 on node0, rank 1 on node0 did not notice within 0.3 s" in run.stderr


@pytest.mark.parametrize(
    ("options", "script", "exit_code"),
    [
        ((), "import sys; sys.exit(42)", 42),
        ((), "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
        (("--timeout", "1s"), "import time; time.sleep(600)", 124),
    ],
    ids=["code", "signal", "too long"],
)
def test_exit_codes_are_those_of_a_shell(
    lab: RunLab, options: tuple[str, ...], script: str, exit_code: int
) -> None:
    run = lab("--nodes", "1", *options, *QUICK, *python(script))
    assert run.exit_code == exit_code, run.stderr


def test_a_cut_link_carries_nothing_more(lab: RunLab, tmp_path: Path) -> None:
    arguments = ("--nodes", "2", "--cut", "node1", "--after", "3s", "--grace", "300ms", "--json")
    run = lab(*arguments, *QUICK, *python(HEARTBEAT, tmp_path))
    assert run.exit_code == 5, run.stderr
    assert "lab: the link of node1 is down" in run.stderr
    assert run.result["cut_seconds"] >= 3
    assert run.result["failure"] == {"node": 0, "rank": 0, "exit_code": 5}
    assert int((tmp_path / "beats").read_text()) > 0


@pytest.mark.parametrize("options", [(), ("--torchrun",)], ids=["ranks", "torchrun"])
def test_a_job_of_torch_meets_over_the_links(lab: RunLab, options: tuple[str, ...]) -> None:
    arguments = ("--nodes", "2", "--json", "--timeout", "80s", *options)
    run = lab(*arguments, *QUICK, *python(ALL_REDUCE))
    assert run.exit_code == 0, run.stderr
    assert "sum 3.0 3.0 of 2" in run.stderr
    # A ring over two ranks: each sends its megabyte once, half in each phase.
    assert all(1_000_000 < sent < 1_100_000 for sent in run.result["sent_bytes"])


def test_commands_of_slipstream_are_found_and_named_options_stay_theirs(lab: RunLab) -> None:
    run = lab("--nodes", "1", *QUICK, "slipstream", "--version", PATH="/usr/bin:/bin")
    assert (run.exit_code, run.stdout[:11]) == (0, "slipstream "), run.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cut", "node1"), "--cut and --after belong together"),
        (("--cut", "two", "--after", "1s"), "--cut two names no node"),
        (("--cut", "node2", "--after", "1s"), "the nodes are node0 to node1"),
        (("--cut", f"node{'9' * 5000}", "--after", "1s"), "names no node"),
        (("--rate", "fast"), "rate 'fast' cannot be read"),
        (("--timeout", f"{'9' * 20}s"), "is too long: the lab waits 30 days at most"),
        (("--per-node", "100000"), "--per-node 100000: a node has 1 to 10,000 ranks"),
    ],
)
def test_mistakes_are_told_in_one_line(lab: RunLab, arguments: tuple[str, ...], said: str) -> None:
    run = lab("--nodes", "2", *QUICK, *arguments, "--", "true")
    assert run.exit_code == 1
    assert said in run.stderr
    assert run.stderr.count("\n") == 1
