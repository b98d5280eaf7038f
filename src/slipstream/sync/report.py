"""What the engine tells about a round: its timeline, and where non-finite gradients began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from slipstream.sync.tickets import Finished


@dataclass(frozen=True)
class BucketTimes:
    """One bucket's moments, in seconds of time.perf_counter().

    ready: its last gradient was there; start, end: its collective. bytes: of its gradients.
    """

    index: int
    bytes: int
    ready_seconds: float
    start_seconds: float
    end_seconds: float


class Travelled(Protocol):
    """A bucket that was sent."""

    bytes: int
    ready_seconds: float
    ticket: Finished | None


@dataclass(frozen=True)
class Travel:
    """What is kept of a bucket's journey; its moments are read when somebody asks for them."""

    bytes: int
    ready_seconds: float
    ticket: Finished

    @classmethod
    def of(cls, bucket: Travelled) -> Self:
        """The bucket's last journey; it has been sent."""
        assert bucket.ticket is not None
        return cls(bucket.bytes, bucket.ready_seconds, bucket.ticket)

    def times(self, index: int) -> BucketTimes:
        """Its moments. On a GPU this waits."""
        ticket = self.ticket
        return BucketTimes(
            index, self.bytes, self.ready_seconds, ticket.start_seconds, ticket.end_seconds
        )


@dataclass(frozen=True)
class StepTimeline:
    """The last synchronised backward on this rank.

    exposed_seconds: how long the training thread stood waiting for buckets; hidden_seconds: the
    rest of the time that collectives took. gathers: with a pipelined plan, the buckets of the
    forward that followed, which ended the round; until then the timeline is of the round before.
    """

    buckets: tuple[BucketTimes, ...] = ()
    exposed_seconds: float = 0.0
    gathers: tuple[BucketTimes, ...] = ()

    @property
    def hidden_seconds(self) -> float:
        """Communication that ran beside computation."""
        both = (*self.buckets, *self.gathers)
        busy = sum(bucket.end_seconds - bucket.start_seconds for bucket in both)
        return max(0.0, busy - self.exposed_seconds)


@dataclass(frozen=True)
class NonFinite:
    """Where infinite or NaN gradients began: the ranks, and the first of them to be ready.

    parameter: the name of the first such gradient in plan order on the lowest of the ranks.
    """

    ranks: tuple[int, ...]
    parameter: str
