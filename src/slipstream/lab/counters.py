"""What passed a network interface, as its own counters say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import LabError
from slipstream.lab.settings import INTERFACE


@dataclass(frozen=True)
class InterfaceBytes:
    """Bytes that an interface has sent and received, headers of Ethernet, IP and TCP included."""

    sent: int
    received: int

    def since(self, earlier: InterfaceBytes) -> InterfaceBytes:
        """What passed between two readings."""
        return InterfaceBytes(self.sent - earlier.sent, self.received - earlier.received)


def interface_bytes(interface: str = INTERFACE) -> InterfaceBytes:
    """The counters of an interface of the network that this process is in.

    On a node of the lab the default is the node's link. Raises LabError when there is no such
    interface.
    """
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            fields = numbers.split()
            return InterfaceBytes(sent=int(fields[8]), received=int(fields[0]))
    raise LabError(f"there is no network interface {interface} here")
