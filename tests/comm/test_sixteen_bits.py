"""Case 28: means of 16-bit values and on 16-bit wires, on 64 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ranks import Rank, run_ranks
from simulated_group import run_simulated
from slipstream.cluster import Cluster
from slipstream.comm.flat import ALGORITHMS, Flat
from slipstream.comm.nodes import Hierarchical, Torus
from ways import MESSAGES, WAYS, Way, Ways

RANKS = 64
NODES = Cluster((8,) * 8)
TINY = 2.0**-24
"""What 6e-8 is in float16, its smallest number."""
SMALLEST_SINGLE = 2.0**-149
SIMULATED = [way for way in MESSAGES if way.name != "native"]


def gradients_of(rank: int) -> dict[str, tuple[list[float], list[float]]]:
    """Values in half precision, and their means over all ranks."""
    odd = rank % 2 == 1
    return {
        "2,000": ([2000.0, -2000.0], [2000.0, -2000.0]),
        "6e-8": ([6e-8, -6e-8], [TINY, -TINY]),
        "large and tiny by turns": ([2000.0 if odd else 6e-8], [1000.0]),
        "large that cancel": ([2000.0 if odd else -2000.0], [0.0]),
        "tiny on one rank": ([RANKS * TINY if rank == 5 else 0.0], [TINY]),
        "large on one rank": ([2048.0 if rank == RANKS - 1 else 0.0], [32.0]),
    }


CASES = [case for case, (values, _) in gradients_of(0).items() for _ in values]
MEANS = [mean for _, means in gradients_of(0).values() for mean in means]


def collective_of(way: Way, group: Any, cluster: Cluster) -> Any:
    if way.name in ALGORITHMS:
        return Flat(way.name, group, way.wire)
    return (Torus if way.name == "torus" else Hierarchical)(group, cluster, way.wire)


def simulated(way: Way, values: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    def body(group: Any) -> torch.Tensor:
        flat = values(group.rank())
        collective_of(way, group, NODES).sum_(flat, RANKS)
        return flat

    return run_simulated(body, RANKS)


def relative_error(way: Way) -> float:
    """Of one rounding, times the roundings on an element's way."""
    roundings = {"ring": RANKS + 1, "torus": 3, "direct": 2}.get(way.name, 8)
    return float(
        roundings * {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[way.wire]
    )


def halves(rank: int) -> torch.Tensor:
    return torch.tensor([v for values, _ in gradients_of(rank).values() for v in values]).half()


@pytest.mark.parametrize("way", SIMULATED, ids=str)
def test_means_of_half_precision_over_64_ranks(way: Way) -> None:
    outcomes = simulated(way, halves)
    for mine in outcomes:
        assert torch.equal(mine, outcomes[0]), "all ranks hold the same bits"
    largest = torch.stack([halves(rank) for rank in range(RANKS)]).double().abs().amax(0)
    for case, found, mean, size in zip(
        CASES, outcomes[0].tolist(), MEANS, largest.tolist(), strict=True
    ):
        if way.wire != "bfloat16" or "6e-8" in case:
            assert found == mean, f"{case}: nothing had to be rounded"
        # where values cancel the rounding of what had been summed before is left
        assert abs(found - mean) <= (abs(mean) or size) * relative_error(way), case


def test_denormals_of_single_precision_are_not_dropped() -> None:
    values = torch.tensor([64.0, -1.0, 3.0]) * SMALLEST_SINGLE
    those = [way for way in WAYS if way.wire == "float32"]

    def body(rank: Rank) -> list[torch.Tensor]:
        ways, found = Ways(rank), []
        for way in those:
            flat = values.clone()
            ways.get(way, (2, 2)).sum_(flat, 4)
            found.append(flat)
        return found

    for found in run_ranks(body, 4):
        for way, mine in zip(those, found, strict=True):
            assert torch.equal(mine, values), str(way)


@pytest.mark.parametrize("largest", [60000.0, 65504.0])
def test_eight_real_ranks_with_larger_values_give_the_same(largest: float) -> None:
    """Every way over Gloo, those of pieces too: the sums lie far beyond float16's range."""
    values = torch.tensor([largest, -largest, TINY, -2 * TINY])
    # bfloat16 has 65,536 next to 65,504, which is more than float16 can hold
    those = [way for way in WAYS if largest < 65000.0 or way.wire != "bfloat16"]
    shape = (2, 2, 2, 2)

    def body(rank: Rank) -> list[torch.Tensor]:
        ways, found = Ways(rank), []
        for way in those:
            flat = values.half()
            ways.get(way, shape).sum_(flat, 8)
            found.append(flat)
        return found

    outcomes = run_ranks(body, 8, timeout_seconds=30.0)
    for case, way in enumerate(those):
        tolerance = 10 * 2.0**-8 if way.wire == "bfloat16" else 0.0
        for found in outcomes:
            assert torch.equal(found[case], outcomes[0][case]), str(way)
            torch.testing.assert_close(
                found[case].float(), values, rtol=tolerance, atol=0.0, msg=str(way)
            )
