"""What a lab run is asked for: the cluster to emulate, the command, and what to do to it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from slipstream.cluster import Cluster
from slipstream.errors import LabError
from slipstream.lab.units import LONGEST_SECONDS

MIN_RATE_BITS_PER_SECOND = 1e6
MAX_RATE_BITS_PER_SECOND = 100e9
MAX_NODES = 200
MAX_RANKS_PER_NODE = 10_000
MASTER_PORT = 29500
INTERFACE = "slip0"
"""The network card of every node, under the same name on each."""


@dataclass(frozen=True)
class Cut:
    """Take the link of ``node`` down ``after_seconds`` from the start of the command."""

    node: int
    after_seconds: float


@dataclass(frozen=True)
class LabSettings:
    """A lab run.

    rate_bits_per_second: of each node's link, in each direction.
    intra_rate_bits_per_second: what all ranks of a node move among themselves, together; None
        leaves it to the machine.
    grace_seconds: how long ranks may take to end after a signal, or after another rank failed.
    limit_seconds: the longest that the command may run; None is no limit.
    agents: start torchrun's agent on each node rather than the ranks themselves.
    check: measure the links before the command starts.

    Raises LabError for values that no lab can have.
    """

    nodes: int
    ranks_per_node: int
    rate_bits_per_second: float
    command: tuple[str, ...]
    intra_rate_bits_per_second: float | None = None
    cut: Cut | None = None
    grace_seconds: float = 60.0
    limit_seconds: float | None = None
    agents: bool = False
    check: bool = True

    def __post_init__(self) -> None:
        if not self.command:
            raise LabError("no command: write it after --, as in: -- python train.py")
        if not 1 <= self.nodes <= MAX_NODES:
            raise LabError(f"--nodes {self.nodes}: a lab has 1 to {MAX_NODES} nodes")
        if not 1 <= self.ranks_per_node <= MAX_RANKS_PER_NODE:
            raise LabError(
                f"--per-node {self.ranks_per_node}: a node has 1 to {MAX_RANKS_PER_NODE:,} ranks"
            )
        for option, rate in (
            ("--rate", self.rate_bits_per_second),
            ("--intra-rate", self.intra_rate_bits_per_second),
        ):
            if rate is None or MIN_RATE_BITS_PER_SECOND <= rate <= MAX_RATE_BITS_PER_SECOND:
                continue
            raise LabError(f"{option}: rates go from 1mbit to 100gbit")
        if self.cut is not None and not 0 <= self.cut.node < self.nodes:
            raise LabError(
                f"--cut node{self.cut.node}: the nodes are node0 to node{self.nodes - 1}"
            )
        self._check_times()

    def _check_times(self) -> None:
        for option, seconds in (
            ("--after", None if self.cut is None else self.cut.after_seconds),
            ("--grace", self.grace_seconds),
            ("--timeout", self.limit_seconds),
        ):
            if seconds is not None and not 0 <= seconds <= LONGEST_SECONDS:
                raise LabError(f"{option}: times go from 0 s to 30 days")

    @property
    def cluster(self) -> Cluster:
        """The shape of the cluster."""
        return Cluster.regular(self.nodes, self.ranks_per_node)

    @property
    def master_address(self) -> str:
        """Where the ranks meet: on node 0, at port `MASTER_PORT`."""
        return node_address(0)

    def to_json(self) -> str:
        """For the process that builds the lab."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LabSettings:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        cut = Cut(**fields["cut"]) if fields["cut"] else None
        return cls(**{**fields, "command": tuple(fields["command"]), "cut": cut})


def node_name(node: int) -> str:
    """The host name of a node."""
    return f"node{node}"


def node_address(node: int) -> str:
    """The IPv4 address of a node, known in the lab alone."""
    return f"10.77.0.{node + 1}"
