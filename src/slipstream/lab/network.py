"""The emulated network: a switch, and nodes that each hang on it by one shaped link.

The switch is a bridge in the namespace of the lab's own process. A node is a network namespace
and a host name, held by open files; processes are started in it. Each link is a veth pair with a
token bucket at both ends, so both directions run at the rate.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import sethostname

from slipstream.errors import LabError
from slipstream.lab import kernel
from slipstream.lab.counters import InterfaceBytes, interface_bytes
from slipstream.lab.isolation import advice
from slipstream.lab.settings import INTERFACE, LabSettings, node_address, node_name

MTU_BYTES = 9000
MIN_BURST_BYTES = 256 * 1024
_BURST_SECONDS = 0.001
_QUEUE_SECONDS = 0.05
_MIN_QUEUE_BYTES = 4 * 1024 * 1024
_COMMAND_LIMIT_SECONDS = 20.0
_SETTLE_SECONDS = 0.05
_SETTLE_LIMIT_SECONDS = 2.0
_SWITCH = "switch"


@dataclass(frozen=True)
class Tools:
    """Paths of iproute2's commands."""

    ip: str
    tc: str


@dataclass(frozen=True)
class Node:
    """A machine of the emulated cluster: open files of its network and host name."""

    number: int
    network: int
    hostname: int

    @property
    def port(self) -> str:
        """The switch's end of its link."""
        return f"port{self.number}"


class Network:
    """The switch and all nodes; exists as long as this process.

    Made by `build_network`. The calling process must have one thread: entering a node moves it.
    """

    def __init__(self, tools: Tools, nodes: Sequence[Node], switch: Node) -> None:
        self._tools = tools
        self._switch = switch
        self.nodes = tuple(nodes)

    @contextmanager
    def entered(self, node: int) -> Iterator[None]:
        """Be on a node: sockets opened and processes started meanwhile belong to it for good."""
        _join(self.nodes[node])
        try:
            yield
        finally:
            _join(self._switch)

    def cut(self, node: int) -> None:
        """Take a node's link down, as if its cable were pulled."""
        _run(self._tools.ip, [f"link set {self.nodes[node].port} down"])

    def settle(self) -> None:
        """Wait, two seconds at most, until nothing is under way on any link."""
        deadline = time.monotonic() + _SETTLE_LIMIT_SECONDS
        before = None
        while (now := self.passed()) != before and time.monotonic() < deadline:
            before = now
            time.sleep(_SETTLE_SECONDS)

    def passed(self) -> list[InterfaceBytes]:
        """What each node has sent and received over its link, in order of the nodes."""
        ports = [interface_bytes(node.port) for node in self.nodes]
        # What the switch receives at a port is what the node has sent.
        return [InterfaceBytes(sent=port.received, received=port.sent) for port in ports]


def build_network(settings: LabSettings, tools: Tools) -> Network:
    """Wire a switch and ``settings.nodes`` nodes in this process's own namespaces.

    Raises LabError where the kernel lacks a kind of device or queue, or refuses it.
    """
    switch = _here(-1)
    _without_ipv6()
    _run(
        tools.ip,
        [
            f"link add {_SWITCH} mtu {MTU_BYTES} type bridge stp_state 0 mcast_snooping 0",
            f"link set {_SWITCH} up",
        ],
        lacks="bridges (CONFIG_BRIDGE)",
    )
    nodes = []
    for number in range(settings.nodes):
        _leave_to_new_namespaces(number)
        try:
            nodes.append(_build_node(number, settings, tools))
        finally:
            _join(switch)
        port = nodes[-1].port
        _run(tools.ip, [f"link set {port} mtu {MTU_BYTES} master {_SWITCH} up"])
        _shape(tools, port, settings.rate_bits_per_second)
    return Network(tools, nodes, switch)


def _leave_to_new_namespaces(number: int) -> None:
    try:
        kernel.unshare(kernel.NEW_NETWORK | kernel.NEW_HOSTNAME)
    except OSError as error:
        raise LabError(
            f"the kernel gives no network to {node_name(number)} ({error.strerror}): use fewer"
            " nodes, or raise `sysctl user.max_net_namespaces`"
        ) from error


def _build_node(number: int, settings: LabSettings, tools: Tools) -> Node:
    """Fill the fresh namespaces that this process is in; its link ends in the process's network."""
    node = _here(number)
    sethostname(node_name(number))
    _without_ipv6()
    # Always built in, and steady on links that drop nothing: BBR, where it is the default, paces by
    # estimates that a busy machine spoils.
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    # The peer goes to the switch by way of a process there: this process's child has its number.
    _run(
        tools.ip,
        [
            "link set lo up",
            f"link add {INTERFACE} mtu {MTU_BYTES} type veth peer name {node.port} netns 1",
            f"addr add {node_address(number)}/24 brd + dev {INTERFACE}",
            f"link set {INTERFACE} up",
        ],
        lacks="virtual Ethernet pairs (CONFIG_VETH)",
    )
    _shape(tools, INTERFACE, settings.rate_bits_per_second)
    if settings.intra_rate_bits_per_second:
        _shape(tools, "lo", settings.intra_rate_bits_per_second)
    return node


def burst_bytes(rate_bits_per_second: float) -> int:
    """What may pass a link at once after a pause: 256 KiB, or a millisecond's worth."""
    return max(MIN_BURST_BYTES, int(rate_bits_per_second / 8 * _BURST_SECONDS))


def _shape(tools: Tools, device: str, rate_bits_per_second: float) -> None:
    """Put a token bucket on what leaves by ``device``."""
    queue = max(_MIN_QUEUE_BYTES, int(rate_bits_per_second / 8 * _QUEUE_SECONDS))
    _run(
        tools.tc,
        [
            f"qdisc add dev {device} root tbf rate {rate_bits_per_second:.0f}bit"
            f" burst {burst_bytes(rate_bits_per_second)}b limit {queue}b"
        ],
        lacks="the token bucket filter (CONFIG_NET_SCH_TBF)",
    )


def _run(tool: str, lines: Sequence[str], lacks: str = "") -> None:
    """Run lines of ``ip`` or ``tc`` in this process's network. Raises LabError with its answer."""
    try:
        done = subprocess.run(
            [tool, "-batch", "-"],
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{tool} did not answer within {error.timeout:.0f} s") from error
    if done.returncode == 0:
        return
    answer = " ".join(done.stderr.split())
    if "not permitted" in answer or "ermission denied" in answer:
        raise LabError(f"the kernel does not let the lab build its network: {advice()}")
    missing = f"this kernel probably lacks {lacks}: " if lacks else ""
    raise LabError(f"{missing}{tool} {lines[0]!r} failed: {answer}")


def _here(number: int) -> Node:
    """Hold the network and host name that this process is in."""
    network = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    hostname = os.open("/proc/self/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
    return Node(number, network, hostname)


def _join(node: Node) -> None:
    kernel.join_namespace(node.network, kernel.NEW_NETWORK)
    kernel.join_namespace(node.hostname, kernel.NEW_HOSTNAME)


def _without_ipv6() -> None:
    """Keep IPv6 out: its neighbour discovery would count as traffic, and Gloo might choose it."""
    for which in ("all", "default"):
        setting = Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6")
        if setting.is_file():
            setting.write_text("1")
