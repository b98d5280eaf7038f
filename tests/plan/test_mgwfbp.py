"""MG-WFBP's rule in one pass against the published code, which starts over after each merge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lanes import random_curve
from slipstream.costs import Curve, Line, Table
from slipstream.plan.lane import Lane
from slipstream.plan.mgwfbp import Variant, mgwfbp


def published(
    ready: Sequence[float], sizes: Sequence[int], curve: Curve, startup: float, variant: Variant
) -> list[int]:
    """The authors' loop: all starts are computed anew after every merge, O(n^2).

    Tensor t joins t+1 by handing over its bytes; a tensor without bytes left takes no time.
    """
    n, held, joined = len(ready), list(sizes), [False] * len(ready)
    takes = [curve.seconds(size) for size in sizes]

    def starts() -> list[float]:
        found: list[float] = []
        for t in range(n):
            found.append(max(found[-1] + takes[t - 1], ready[t]) if t else ready[t])
        return found

    for t in range(n - 1):
        start, next_ready = starts()[t], ready[t + 1]
        merge = next_ready - start < startup
        if variant == "pytorch":
            still_going = next_ready < start + takes[t]
            waits_little = start > next_ready or next_ready - start < startup
            merge = still_going and waits_little
        if merge:
            joined[t], held[t + 1] = True, held[t + 1] + held[t]
            takes[t], takes[t + 1] = 0.0, curve.seconds(held[t + 1])
    return [t + 1 for t in range(n) if not joined[t]]


@pytest.mark.parametrize("variant", ["pytorch", "caffe"])
def test_one_pass_gives_the_published_plan(variant: Variant) -> None:
    rng = np.random.default_rng(1)
    merged = 0
    for index in range(1500):
        n = int(rng.integers(1, 41))
        ready = np.cumsum(rng.exponential(1.0, n)).tolist()
        sizes = rng.integers(1, 1000, n).tolist()
        startup = float(rng.choice([0.05, 1.0, 5.0]))
        curve: Curve = Line(startup, float(rng.choice([1e-4, 1e-3, 1e-2])))
        if index % 2:
            curve = random_curve("any table", rng)
        sums = Lane(ready, sizes, curve).sums
        cuts = mgwfbp(ready, sums, curve, startup, variant)
        assert cuts == published(ready, sizes, curve, startup, variant)
        merged += 1 < len(cuts) < n
    assert merged > 500


@pytest.mark.parametrize("variant", ["pytorch", "caffe"])
@pytest.mark.parametrize(("n", "end"), [(10, 19.0), (50, 91.0), (200, 361.0), (1000, 1801.0)])
def test_golden_ends(variant: Variant, n: int, end: float) -> None:
    """a = 1, b = 1, every gap and size 0.9: the rule merges everything."""
    ready, line = [0.9 * (j + 1) for j in range(n)], Line(1.0, 0.1)
    lane = Lane(ready, [9] * n, line)
    cuts = mgwfbp(ready, lane.sums, line, 1.0, variant)
    assert cuts == [n]
    assert lane.end_seconds(cuts) == pytest.approx(end, rel=1e-12)


def test_three_tensors_for_which_waiting_a_little_twice_is_too_much() -> None:
    """Ready at 0, 0.9 a, 1.8 a: each wait is below a, and together they cost 0.8 a."""
    ready, line = [0.0, 0.9, 1.8], Line(1.0, 1.0)
    lane = Lane(ready, [1, 1, 1], line)
    assert mgwfbp(ready, lane.sums, line, 1.0) == [3]
    assert lane.end_seconds([3]) == pytest.approx(2.8 + 3)
    assert lane.end_seconds([1, 3]) == pytest.approx(2.0 + 3)


def test_only_the_guarded_variant_sees_that_a_message_would_be_over() -> None:
    """A fit says that startup is 1, and this message takes 0.5: nothing is saved by waiting 0.9."""
    quick = Table(((1, 0.5),))
    assert mgwfbp([0.0, 0.9], [0, 1, 2], quick, 1.0, "caffe") == [2]
    assert mgwfbp([0.0, 0.9], [0, 1, 2], quick, 1.0, "pytorch") == [1, 2]
    assert mgwfbp([], [0], quick, 1.0) == []
