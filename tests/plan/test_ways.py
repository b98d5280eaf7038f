"""Which way carries a bucket, what the others would take, and what there is to choose among."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cluster import Cluster
from slipstream.costs import CostKey, Costs, Curve, Line, Link, Links
from slipstream.errors import CostError, PlanError
from slipstream.plan import BucketReason, explain, plan_step, time_step
from slipstream.plan.allowed import check_own, in_words, unused
from slipstream.plan.ways import check_allowed
from slipstream.trace import Trace
from slipstream.wires import DENSE_WIRES, DenseWire, wires_of
from steps import FOUR_NODES, costs_of, lines, step_of, steps

NAMES = ("native", "ring", "direct", "torus")
WIRES: tuple[DenseWire, ...] = ("float32", "bfloat16")
WAYS = [(name, wire) for name in NAMES for wire in WIRES if wire in wires_of(name)]
LINKS = Links(inter=Link(latency_seconds=1e-3, seconds_per_byte=1e-6))


def costs_by(ways: Mapping[tuple[str, DenseWire], Curve], links: Links | None = None) -> Costs:
    """Costs of all-reduces on four nodes."""
    measured: dict[CostKey, Curve] = {
        (name, "all_reduce", wire): curve for (name, wire), curve in ways.items()
    }
    return Costs(FOUR_NODES, measured, links)


some_ways = st.lists(st.sampled_from(WAYS), min_size=1, unique=True).flatmap(
    lambda ways: st.fixed_dictionaries(dict.fromkeys(ways, lines))
)


@given(steps(dtypes=("float32", "bfloat16")), some_ways, st.sampled_from(("wfbp", "optimal")))
def test_each_bucket_is_told_what_every_allowed_way_takes(
    trace: Trace, ways: dict[tuple[str, DenseWire], Curve], planner: str
) -> None:
    costs = costs_by(ways)
    plan = plan_step(planner, trace, costs, collectives=NAMES, allow=WIRES)
    why = explain(plan, trace, costs, collectives=NAMES, allow=WIRES)
    for reason in why.buckets:
        own, *others = reason.ways
        assert (own.collective, own.wire) == (reason.bucket.collective, reason.bucket.wire)
        takes = reason.timing.end_seconds - reason.timing.start_seconds
        assert own.seconds == pytest.approx(takes, abs=1e-12)
        assert all(own.seconds <= other.seconds for other in others)
        assert [other.seconds for other in others] == sorted(other.seconds for other in others)
        assert {(way.collective, way.wire) for way in reason.ways} == set(ways)
        assert bool(reason.by()) == (len(ways) > 1)
    told = [sentence for sentence in why.summary() if sentence.startswith("Of ")]
    assert len(told) == (len(ways) > 1)


def reasons(ways: dict[tuple[str, DenseWire], Curve], *numels: int) -> list[BucketReason]:
    trace = step_of(numels, gap_seconds=1e-3)
    costs = costs_by(ways, LINKS)
    plan = plan_step("wfbp", trace, costs, collectives=NAMES, allow=WIRES)
    return list(explain(plan, trace, costs, collectives=NAMES, allow=WIRES).buckets)


def test_why_the_others_lost_as_a_person_reads_it() -> None:
    trace = step_of([250, 25_000, 50_000], gap_seconds=1e-3)
    costs = costs_by(
        {("native", "float32"): Line(1e-3, 1e-7), ("torus", "bfloat16"): Line(4e-3, 5e-8)}
    )
    ways: dict[str, Any] = {"collectives": ("native", "torus"), "allow": WIRES}
    why = explain(plan_step("wfbp", trace, costs, **ways), trace, costs, **ways)
    assert [reason.by() for reason in why.buckets] == [
        "by native in 1.10 ms; the other way, torus bfloat16, would take 4.05 ms",
        "by torus bfloat16 in 9.00 ms; the other way, native, would take 11.0 ms",
        "by torus bfloat16 in 14.0 ms; the other way, native, would take 21.0 ms",
    ]
    carried = "Of 2 ways, native carries 1 bucket of 1000 B, torus bfloat16 carries 2 buckets of "
    assert f"{carried}293 KiB together." in why.summary()


def test_what_is_by_formula_beside_measured_costs_says_so_and_ties_are_ties() -> None:
    (told,) = reasons(
        {("native", "float32"): Line(0.0, 1e-9), ("ring", "float32"): Line(0.0, 1e-9)}, 250
    )
    assert told.by() == "by native in 1 µs; the best of 6 others, ring, would take as long"
    (told,) = reasons({("native", "float32"): Line(0.0, 1.0)}, 250)
    assert told.by().startswith("by direct bfloat16 (by formula) in ")
    assert all(way.costs == "formula" for way in told.ways if way.collective != "native")
    (told,) = reasons({}, 250)
    assert "formula" not in told.by() and len(told.ways) == len(WAYS)


def test_a_plan_that_goes_its_own_way_is_compared_with_what_was_allowed() -> None:
    """As four_minutes does, and a plan file of other days: the costs of its buckets are its own."""
    trace, costs = step_of([10, 10, 10_000, 10]), costs_of(Line(0.5, 1e-6))
    costs = Costs(FOUR_NODES, {**costs.measured, ("ring", "all_reduce", "float32"): Line(9.0, 0.0)})
    plan = plan_step("four_minutes", trace, costs, pool_bytes=30, switch_bytes=1000)
    assert {bucket.collective for bucket in plan.reduce} == {"hierarchical", "ring"}
    why = explain(plan, trace, costs, collectives=("native",), allow=("float32",))
    for reason in why.buckets:
        assert str(reason.ways[0]) == reason.bucket.collective
        assert "native" in {way.collective for way in reason.ways[1:]}
    for reason, after in zip(why.buckets, why.buckets[1:], strict=False):
        joined = reason.bucket.model_copy(
            update={
                "gradients": reason.bucket.gradients + after.bucket.gradients,
                "bytes": reason.bucket.bytes + after.bucket.bytes,
                "collective": "native",
            }
        )
        at = reason.index
        merged = plan.model_copy(
            update={"reduce": (*plan.reduce[:at], joined, *plan.reduce[at + 2 :])}
        )
        step = time_step(trace, costs, merged).step_seconds
        assert reason.merge_seconds == pytest.approx(step - why.timing.step_seconds, abs=1e-9)


def test_pipelined_goes_by_native_alone_and_its_halves_are_not_compared() -> None:
    """The engine has no other halves: what is measured of others must not tempt a planner."""
    trace = step_of([250] * 4, gap_seconds=1e-3, forward_seconds=4e-3)
    known = costs_of(Line(1e-3, 1e-7))
    costs = Costs(
        FOUR_NODES, {**known.measured, ("ring", "all_reduce", "float32"): Line(0, 0)}, LINKS
    )
    plan = plan_step("pipelined", trace, costs, collectives=("ring", "torus"), allow=WIRES)
    assert plan.gather is not None
    assert {(b.collective, b.wire) for b in (*plan.reduce, *plan.gather)} == {("native", "float32")}
    why = explain(plan, trace, costs, collectives=("ring", "torus"), allow=WIRES)
    assert not any(reason.by() for reason in why.buckets)
    with pytest.raises(PlanError, match="sends float32, and only bfloat16 may travel"):
        plan_step("pipelined", trace, costs, allow=("bfloat16",))


@pytest.mark.parametrize(
    ("collectives", "wires", "words"),
    [
        (("native", "torus"), WIRES, "all_reduce by 'torus' with wire 'float32'"),
        (("native", "ring"), WIRES, "measured ring with bfloat16 travelling"),
        (("native", "direct"), ("float32", "bfloat16", "float16"), "direct with float16"),
    ],
)
def test_what_is_allowed_and_known_to_nobody_is_refused(
    collectives: tuple[str, ...], wires: tuple[DenseWire, ...], words: str
) -> None:
    known = [
        ("native", "float32"),
        ("ring", "float32"),
        ("direct", "float32"),
        ("direct", "bfloat16"),
    ]
    ways: dict[tuple[str, DenseWire], Curve] = {
        (name, wire): Line(1.0, 0.0) for name, wire in WAYS if (name, wire) in known
    }
    with pytest.raises(CostError, match=words) as refused:
        check_allowed(costs_by(ways), collectives, wires)
    assert "slipstream probe" in str(refused.value)
    check_allowed(costs_by(ways, LINKS), collectives, wires)
    check_allowed(costs_by(ways), ("native", "ring", "direct"), WIRES)


@given(
    st.lists(st.sampled_from(list(DENSE_WIRES)), min_size=1, unique=True),
    st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=1, unique=True),
)
def test_what_goes_with_nothing_else_is_named_unless_nothing_goes_at_all(
    collectives: list[str], wires: list[DenseWire]
) -> None:
    pairs = [(name, wire) for name in collectives for wire in wires if wire in wires_of(name)]
    idle = {name for name in collectives if name not in {name for name, _ in pairs}}
    idle |= {wire for wire in wires if wire not in {wire for _, wire in pairs}}
    told = unused(collectives, wires)
    assert {sentence.split()[0] for sentence in told} == (idle if pairs else set())


def test_ways_in_words() -> None:
    assert in_words([("native", "float32"), ("direct", "float32")]) == "native, direct"
    ways = [("native", "float32"), ("direct", "bfloat16"), ("torus", "bfloat16")]
    assert in_words(ways) == "native; with bfloat16 direct, torus"  # type: ignore[arg-type]
    assert unused(["native", "ring"], ["float32", "float16"]) == [
        "float16 is allowed and never travels: native and ring cannot send it"
    ]
    assert unused(["native", "ring"], ["bfloat16"]) == [
        "native carries nothing: it sends float32 only"
    ]


def test_a_planner_with_collectives_of_its_own_must_be_allowed_them() -> None:
    check_own("optimal", ("torus",))
    check_own("four_minutes", ("native", "ring", "hierarchical"))
    with pytest.raises(PlanError, match="goes by hierarchical and ring and nothing else"):
        check_own("four_minutes", ("native", "ring"))
    with pytest.raises(PlanError, match="'pipelined' goes by native"):
        check_own("pipelined", ("torus",))


def test_a_torus_on_unequal_nodes_has_no_cost() -> None:
    uneven = Costs(Cluster((2, 1)), {}, Links(intra=LINKS.inter, inter=LINKS.inter))
    with pytest.raises(CostError, match="as many ranks on every node"):
        check_allowed(uneven, ("native", "torus"), ("float32",))
