"""The size-only planners: their rules, and what holds for all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import PlanError
from slipstream.plan import PLANNERS, Gradient, plan_buckets

DTYPES = st.sampled_from(["float32", "float64", "bfloat16", "complex64"])
SHAPES = st.lists(st.tuples(st.integers(0, 50), DTYPES), max_size=30)


def gradients_of(shapes: list[tuple[int, str]]) -> list[Gradient]:
    return [Gradient(f"g{i}", numel, dtype) for i, (numel, dtype) in enumerate(shapes)]


def sizes(planner: str, numels: list[int], **options: Any) -> list[list[int]]:
    """Buckets as lists of element counts of float32 gradients."""
    gradients = [Gradient(f"g{i}", numel) for i, numel in enumerate(numels)]
    by_name = {gradient.name: gradient.numel for gradient in gradients}
    plan = plan_buckets(planner, gradients, **options)
    return [[by_name[name] for name in bucket.gradients] for bucket in plan.reduce]


@given(SHAPES, st.sampled_from(sorted(PLANNERS)))
def test_every_gradient_stands_in_exactly_one_bucket_in_ready_order(
    shapes: list[tuple[int, str]], planner: str
) -> None:
    gradients = gradients_of(shapes)
    plan = plan_buckets(planner, gradients)
    plan.check_covers(gradients)
    position = {gradient.name: index for index, gradient in enumerate(gradients)}
    by_name = {gradient.name: gradient for gradient in gradients}
    last_ready = []
    for bucket in plan.reduce:
        places = [position[name] for name in bucket.gradients]
        assert places == sorted(places)
        assert bucket.bytes == sum(by_name[name].bytes for name in bucket.gradients)
        last_ready.append(places[-1])
    assert last_ready == sorted(last_ready), "launch order is the order in which buckets fill"


def test_wfbp_sends_every_tensor_alone_and_single_sends_one_message() -> None:
    assert sizes("wfbp", [3, 1, 2]) == [[3], [1], [2]]
    assert sizes("single", [3, 1, 2]) == [[3, 1, 2]]
    assert sizes("single", []) == []


def test_ddp_closes_a_bucket_that_has_reached_its_limit() -> None:
    rule = {"first_bytes": 8, "cap_bytes": 16}
    assert sizes("ddp", [1, 1, 1, 2, 1, 9, 1], **rule) == [[1, 1], [1, 2, 1], [9], [1]]
    megabytes = [2**18] * 60  # of 1 MiB each
    assert [len(bucket) for bucket in sizes("ddp", megabytes)] == [1, 25, 25, 9]


def test_fixed_never_exceeds_its_limits_except_by_a_single_tensor() -> None:
    rule = {"first_bytes": 8, "cap_bytes": 16}
    assert sizes("fixed", [1, 1, 1, 2, 1, 9, 1], **rule) == [[1, 1], [1, 2, 1], [9], [1]]
    assert sizes("fixed", [1, 3, 2, 2, 1], **rule) == [[1], [3], [2, 2], [1]]


def test_fixed_cuts_the_last_bucket_from_the_end() -> None:
    rule = {"first_bytes": 4, "cap_bytes": 400}
    assert sizes("fixed", [1, 2, 3, 1, 2], last_bytes=12, **rule) == [[1], [2, 3], [1, 2]]
    assert sizes("fixed", [1, 2, 3, 9], last_bytes=4, **rule) == [[1], [2, 3], [9]]
    assert sizes("fixed", [1], last_bytes=400, **rule) == [[1]]


@pytest.mark.parametrize(
    ("planner", "options", "words"),
    [
        ("optimum", {}, "no planner 'optimum'; there are wfbp, single, fixed, ddp"),
        ("wfbp", {"cap_bytes": 1}, "'wfbp' has no option 'cap_bytes'; it takes no options"),
        ("ddp", {"cap_mb": 1}, "'ddp' has no option 'cap_mb'; it takes first_bytes, cap_bytes"),
        ("fixed", {"cap_bytes": 0}, "cap_bytes is 0"),
        ("ddp", {"first_bytes": -1}, "first_bytes is -1"),
        ("ddp", {"cap_bytes": "1e6"}, "cap_bytes is 1e6; .* in digits"),
        ("fixed", {"cap_bytes": True}, "cap_bytes is True"),
    ],
)
def test_wrong_names_and_limits_are_refused(
    planner: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        plan_buckets(planner, gradients_of([(1, "float32")]), **options)
