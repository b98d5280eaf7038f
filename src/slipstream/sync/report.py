"""What the engine tells about a round: its timeline, and where non-finite gradients began."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class StepTimeline:
    """The last synchronised backward on this rank.

    exposed_seconds: how long the training thread stood waiting for buckets; hidden_seconds: the
    rest of the time that collectives took.
    """

    buckets: tuple[BucketTimes, ...] = ()
    exposed_seconds: float = 0.0

    @property
    def hidden_seconds(self) -> float:
        """Communication that ran beside computation."""
        busy = sum(bucket.end_seconds - bucket.start_seconds for bucket in self.buckets)
        return max(0.0, busy - self.exposed_seconds)


@dataclass(frozen=True)
class NonFinite:
    """Where infinite or NaN gradients began: the ranks, and the first of them to be ready.

    parameter: the name of the first such gradient in plan order on the lowest of the ranks.
    """

    ranks: tuple[int, ...]
    parameter: str
