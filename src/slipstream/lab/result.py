"""What a lab run measured, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.lab.check import LinkCheck
from slipstream.lab.supervise import Failure


@dataclass(frozen=True)
class LabResult:
    """A lab run that was built and whose command was started.

    exit_code: of the command, the first of its processes that failed; 128 and the number of the
        signal that stopped it; 124 when it exceeded its limit.
    seconds: from the start of the command to the end of its last process.
    sent_bytes, received_bytes: by each node over its link while the command ran, with headers.
    check, intra_check: of the links between nodes, and of the ranks' among themselves; None where
        there is nothing to check, or it was left out.
    failure: the process that failed first, if any.
    cut_seconds: when the link of the node to cut went down, after the start of the command.
    """

    nodes: int
    ranks_per_node: int
    rate_bits_per_second: float
    intra_rate_bits_per_second: float | None
    exit_code: int
    seconds: float
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    check: LinkCheck | None
    intra_check: LinkCheck | None
    failure: Failure | None
    cut_seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; checks and failure are objects in it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LabResult:
        """Read what `to_dict` wrote, after a way through JSON."""
        failure = fields["failure"]
        own = {
            "sent_bytes": tuple(fields["sent_bytes"]),
            "received_bytes": tuple(fields["received_bytes"]),
            "check": _link_check(fields["check"]),
            "intra_check": _link_check(fields["intra_check"]),
            "failure": Failure(**failure) if failure else None,
        }
        return cls(**{**fields, **own})


def _link_check(fields: Mapping[str, Any] | None) -> LinkCheck | None:
    if fields is None:
        return None
    streams = tuple(fields["together_bits_per_second"])
    return LinkCheck(**{**fields, "together_bits_per_second": streams})
