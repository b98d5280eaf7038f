"""Steps that differ: the slowest rank's distribution, percentiles, seeds."""

from __future__ import annotations

from math import exp
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs import Line
from slipstream.errors import SlipstreamError
from slipstream.plan import PLANNER_NAMES, plan_step, time_step
from slipstream.simulate import Percentiles, Variation, draw_steps, load_trace, slowest_ranks
from slipstream.trace import Trace
from steps import costs_of, lines, step_of, steps


@given(
    trace=steps(dtypes=("float32", "float16")),
    line=lines,
    planner=st.sampled_from(PLANNER_NAMES),
    wait=st.sampled_from(["backward", "update", "forward"]),
)
def test_without_variation_every_step_is_the_planned_one(
    trace: Trace, line: Line, planner: str, wait: str
) -> None:
    costs = costs_of(line)
    plan = plan_step(planner, trace, costs)
    if plan.gather is None:
        plan = plan.model_copy(update={"wait": wait})
    timing = time_step(trace, costs, plan)
    drawn = draw_steps(trace, plan, timing, Variation(num_steps=3), 4)
    assert drawn == pytest.approx([timing.step_seconds] * 3)


@given(trace=steps(), line=lines, planner=st.sampled_from(PLANNER_NAMES))
def test_stragglers_everywhere_are_a_slower_computation(
    trace: Trace, line: Line, planner: str
) -> None:
    costs = costs_of(line)
    plan = plan_step(planner, trace, costs)
    variation = Variation(straggler_share=1.0, straggler_slowdown=3.0, num_steps=2)
    drawn = draw_steps(trace, plan, time_step(trace, costs, plan), variation, 4)
    slower = trace.model_copy(
        update={
            "input_seconds": 3 * trace.input_seconds,
            "forward_seconds": 3 * trace.forward_seconds,
            "update_seconds": 3 * trace.update_seconds,
            "gradients": tuple(
                gradient.model_copy(
                    update={
                        "ready_seconds": 3 * gradient.ready_seconds,
                        "needed_seconds": 3 * (gradient.needed_seconds or 0.0),
                    }
                )
                for gradient in trace.gradients
            ),
        }
    )
    assert drawn == pytest.approx([time_step(slower, costs, plan).step_seconds] * 2)


@pytest.mark.parametrize("ranks", [1, 16, 4096])
def test_the_slowest_rank_is_drawn_from_the_distribution_of_a_maximum(ranks: int) -> None:
    variation = Variation(compute_jitter=0.1, num_steps=20_000)
    found = np.quantile(slowest_ranks(variation, ranks), [0.1, 0.5, 0.9])
    expected = [exp(0.1 * NormalDist().inv_cdf(share ** (1 / ranks))) for share in (0.1, 0.5, 0.9)]
    assert found == pytest.approx(expected, rel=0.01)


def test_some_steps_have_a_straggler() -> None:
    variation = Variation(straggler_share=0.01, straggler_slowdown=4.0, num_steps=20_000)
    factors = slowest_ranks(variation, 10)
    assert set(factors.tolist()) == {1.0, 4.0}
    assert (factors == 4.0).mean() == pytest.approx(1 - 0.99**10, rel=0.1)


def test_more_ranks_wait_longer_and_tails_are_longer_than_means() -> None:
    trace = load_trace("resnet50")
    costs = costs_of(Line(1e-3, 1e-9))
    plan = plan_step("optimal", trace, costs)
    timing = time_step(trace, costs, plan)
    variation = Variation(compute_jitter=0.05, network_jitter=0.2, straggler_share=1e-3)
    few, many = (
        Percentiles.of(draw_steps(trace, plan, timing, variation, ranks)) for ranks in (2, 512)
    )
    for found in (few, many):
        assert found.p50 <= found.p95 <= found.p99
        assert found.p99 > found.mean
    assert many.p50 > few.p50 > timing.step_seconds
    assert many.mean > few.mean


def test_a_seed_gives_the_same_steps_and_another_seed_others() -> None:
    trace, costs = step_of([10, 20]), costs_of(Line(0.1, 0.01))
    plan = plan_step("wfbp", trace, costs)
    timing = time_step(trace, costs, plan)

    def drawn(seed: int) -> list[float]:
        variation = Variation(
            compute_jitter=0.1, network_jitter=0.1, straggler_share=0.1, num_steps=20, seed=seed
        )
        return [float(step) for step in draw_steps(trace, plan, timing, variation, 8)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 20


def test_planners_are_compared_under_the_same_computation() -> None:
    variation = Variation(compute_jitter=0.3, straggler_share=0.05, num_steps=100, seed=5)
    trace = step_of([10, 20], forward_seconds=1.0)
    costs = costs_of(Line(0.0, 0.0))
    steps_of = []
    for planner in ("wfbp", "single"):
        plan = plan_step(planner, trace, costs)
        steps_of.append(draw_steps(trace, plan, time_step(trace, costs, plan), variation, 8))
    assert steps_of[0] == pytest.approx(steps_of[1])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("compute_jitter", -0.1),
        ("compute_jitter", float("nan")),
        ("network_jitter", 3.0),
        ("straggler_share", 1.5),
        ("straggler_share", float("nan")),
        ("straggler_slowdown", 0.5),
        ("straggler_slowdown", float("inf")),
        ("num_steps", 0),
        ("seed", -1),
    ],
)
def test_settings_that_make_no_sense_are_named(setting: str, value: float) -> None:
    with pytest.raises(SlipstreamError, match=setting):
        Variation(**{setting: value})  # type: ignore[arg-type]
