"""The rate of a link, which the token buckets on it do not hide."""

from __future__ import annotations

import pytest
import torch

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.comm.peers import Peers
from slipstream.costs import Links
from slipstream.measure.links import measure_links, seconds_per_byte
from slipstream.measure.timing import Bench
from worked_models import StoodClock

CPU = torch.device("cpu")


def arrivals(rate: float, burst: float, pause: float, message: int, num: int) -> list[float]:
    """When messages arrive over a link with a token bucket, each sent `pause` after the last.

    rate: bytes a second; burst, message: bytes. The bucket is full at first.
    """
    now, tokens, found = 0.0, burst, []
    for _ in range(num):
        tokens = min(burst, tokens + pause * rate)
        took = max(0.0, message - tokens) / rate
        tokens = max(0.0, tokens - message)
        now += pause + took
        found.append(now)
    return found


@pytest.mark.parametrize("pause", [0.0, 1e-4, 1.9e-3])
@pytest.mark.parametrize("message", [2**19, 2**22])
def test_a_burst_and_pauses_that_fill_the_bucket_leave_the_rate_as_it_is(
    pause: float, message: int
) -> None:
    rate, burst = 1.25e8, 2.0**18  # 1 Gbit/s; a pause of 2 ms fills the bucket
    streams = [arrivals(rate, burst, pause, message, 4) for _ in range(2)]
    assert streams[0][0] < message / rate  # the first message alone would look faster
    found = seconds_per_byte([*streams[0], *streams[1]], 4, message)
    assert found == pytest.approx(1 / rate, rel=1e-9)


def test_the_median_of_streams_counts() -> None:
    moments = [0.0, 1.0, 2.0, 10.0, 11.0, 16.0, 20.0, 21.0, 23.0]  # 2, 6 and 3 s for two messages
    assert seconds_per_byte(moments, 3, 100) == 3.0 / 200


def test_the_receivers_clock_tells_the_rate_and_the_senders_the_latency() -> None:
    def body(rank: Rank) -> Links:
        clock = StoodClock()

        def ticking() -> float:
            clock.wait(1.0 + rank.rank)  # every look takes 1 s on rank 0 and 2 s on rank 1
            return clock.now

        bench = Bench(Peers(rank.group, None, 20.0, CPU), CPU, ticking)
        return measure_links(rank.group, Cluster((1, 1)), bench, 2048)

    first, second = run_ranks(body, 2)
    assert first == second and first.intra is None and first.inter is not None
    # Both directions were measured, with messages of 512 KiB at the least; the slower one counts.
    assert first.inter.seconds_per_byte == 2.0 / 2**19
    assert first.inter.latency_seconds == 2.0 / 2
