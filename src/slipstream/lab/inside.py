"""The side of the lab inside the namespaces, as ``python -m`` this module.

A first process makes the namespaces and has two children: one is process 1 among the run's
processes, the other builds the network, checks it, and runs the command. Each of the three is
killed by the kernel when its parent dies, and with process 1 all that the command started.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.errors import LabError
from slipstream.lab import kernel
from slipstream.lab.check import LinkCheck, check_between, check_within
from slipstream.lab.control import Control
from slipstream.lab.isolation import (
    enter_namespaces,
    exit_if_at_end,
    reap_until_killed,
    show_own_processes,
)
from slipstream.lab.job import plan_starts, start_members
from slipstream.lab.network import Tools, build_network
from slipstream.lab.result import LabResult
from slipstream.lab.settings import LabSettings, node_address, node_name
from slipstream.lab.stream import Interrupted
from slipstream.lab.supervise import Supervisor, say
from slipstream.lab.units import format_rate
from slipstream.words import percent, size


def main(arguments: list[str]) -> int:
    """Run the lab that the arguments name: folder, pid of the user's side, and two pipes of it."""
    folder, owner, control, report = Path(arguments[0]), *(int(text) for text in arguments[1:4])
    kernel.die_with_parent()
    if os.getppid() != owner:
        return 1
    try:
        enter_namespaces()
    except LabError as error:
        _answer(report, {"error": str(error)})
        return 1
    alive, held = os.pipe()
    first = _fork(lambda: _be_first(alive, (held, control, report)))
    runner = _fork(lambda: _be_runner(alive, held, folder, Control(control), report))
    os.close(report)
    status = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1])
    # What the command left behind ends with process 1, and is gone when that one is reaped.
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    return status


def _fork(task: Callable[[], int]) -> int:
    """Run ``task`` in a process of its own; it ends with the code that the task returns."""
    pid = os.fork()
    if pid == 0:
        sys.exit(task())
    return pid


def _be_first(alive: int, others: tuple[int, ...]) -> int:
    for descriptor in others:
        os.close(descriptor)
    reap_until_killed(alive)


def _be_runner(alive: int, held: int, folder: Path, control: Control, report: int) -> int:
    os.close(held)
    kernel.die_with_parent()
    exit_if_at_end(alive)
    try:
        _answer(report, _run(folder, control))
    except LabError as error:
        _answer(report, {"error": str(error)})
    except Interrupted:
        if control.owner_gone:
            return 1
        _answer(report, {"interrupted": control.signals[0]})
    return 0


def _answer(report: int, document: dict[str, Any]) -> None:
    with os.fdopen(report, "w", encoding="utf-8") as stream:
        json.dump(document, stream)


def _run(folder: Path, control: Control) -> dict[str, Any]:
    """Build, check, run, count: everything from empty namespaces to the summary."""
    orders = json.loads((folder / "orders.json").read_text(encoding="utf-8"))
    settings = LabSettings.from_json(orders["settings"])
    starts = plan_starts(settings, os.environ)
    show_own_processes()
    _name_nodes(folder, settings)
    network = build_network(settings, Tools(**orders["tools"]))
    check = intra_check = None
    if settings.check:
        check = check_between(network, settings, control.stop_wanted)
        _say_check(check, "between nodes")
        intra_check = check_within(network, settings, control.stop_wanted)
        _say_check(intra_check, "within nodes")
    if control.stop_wanted():
        raise Interrupted
    network.settle()
    before = network.passed()
    logs, overwrite = Path(orders["logs"]), orders["overwrite"]
    members = list(start_members(network, starts, logs, overwrite=overwrite))
    end = Supervisor(members, network, settings, control).run()
    passed = [now.since(then) for now, then in zip(network.passed(), before, strict=True)]
    if settings.nodes > 1:
        total = size(sum(node.sent for node in passed))
        most = size(max(node.sent for node in passed))
        say(f"{total} went over the links, at most {most} from one node")
    return LabResult(
        nodes=settings.nodes,
        ranks_per_node=settings.ranks_per_node,
        rate_bits_per_second=settings.rate_bits_per_second,
        intra_rate_bits_per_second=settings.intra_rate_bits_per_second,
        exit_code=end.exit_code,
        seconds=end.seconds,
        sent_bytes=tuple(node.sent for node in passed),
        received_bytes=tuple(node.received for node in passed),
        check=check,
        intra_check=intra_check,
        failure=end.failure,
        cut_seconds=end.cut_seconds,
    ).to_dict()


def _say_check(check: LinkCheck | None, where: str) -> None:
    if check is None:
        return
    slowest, rate = min(check.together_bits_per_second), check.rate_bits_per_second
    say(
        f"links {where} of {format_rate(rate)}: plain streams from all nodes at once reach"
        f" {format_rate(slowest)} ({percent(slowest / rate)})"
    )
    if check.cpu_bound:
        say(f"figures of this run may be CPU-bound: {check.cpu_bound}")


def _name_nodes(folder: Path, settings: LabSettings) -> None:
    """Let the nodes find each other by name."""
    hosts = folder / "hosts"
    lines = ["127.0.0.1 localhost"]
    for node in range(settings.nodes):
        # Both forms: sockets of the IPv6 family, as torch's, look for the longer one.
        for address in (node_address(node), f"::ffff:{node_address(node)}"):
            lines.append(f"{address} {node_name(node)}")
    hosts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if Path("/etc/hosts").exists():
        kernel.bind_mount(str(hosts), "/etc/hosts")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
