"""Many clusters and planners: speed-up, efficiency, where costs come from, plots."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from slipstream.cluster import Cluster
from slipstream.costs import Costs, Curve, Line, Link, Links, Operation, Wire
from slipstream.errors import CostError, PlanError, SlipstreamError
from slipstream.plan import PLANNER_NAMES
from slipstream.simulate import (
    Allowed,
    PlannerChoice,
    ScalingRow,
    Variation,
    load_trace,
    plot_kind,
    plot_scaling,
    simulate_scaling,
)
from steps import costs_of, step_of

LINKS = Links(
    intra=Link(latency_seconds=1e-5, seconds_per_byte=1e-10),
    inter=Link(latency_seconds=3e-5, seconds_per_byte=8e-10),
)
MEASURED: dict[tuple[str, Operation, Wire], Curve] = {
    ("native", "all_reduce", "float32"): Line(1e-3, 1e-9)
}


def choices(*texts: str) -> list[PlannerChoice]:
    return [PlannerChoice.parse(text) for text in texts]


def test_rows_are_what_their_formulas_say() -> None:
    trace = step_of([1000] * 4, forward_seconds=2.0)
    costs = Costs(Cluster.regular(4, 1), {("native", "all_reduce", "float32"): Line(0.5, 0.0)})
    (row,) = simulate_scaling(trace, costs, [4], choices("single"))
    assert row == ScalingRow(
        nodes=4,
        ranks=4,
        planner="single",
        num_buckets=1,
        step_seconds=6.5,
        exposed_seconds=0.5,
        lower_bound_seconds=6.5,
        speedup=4 * 6 / 6.5,
        efficiency=6 / 6.5,
        costs="measured",
    )


def test_every_planner_on_every_number_of_nodes_in_order() -> None:
    costs = Costs(Cluster.regular(16, 2), {}, LINKS)
    rows = simulate_scaling(load_trace("resnet50"), costs, [1, 64, 4], choices(*PLANNER_NAMES))
    pairs = [(nodes, planner) for nodes in (1, 64, 4) for planner in PLANNER_NAMES]
    assert [(row.nodes, row.planner) for row in rows] == pairs
    assert [row.ranks for row in rows] == [2 * row.nodes for row in rows]
    for row in rows:
        assert 0 < row.efficiency <= 1 and row.speedup == pytest.approx(row.efficiency * row.ranks)
        assert row.lower_bound_seconds is not None
        assert row.lower_bound_seconds <= row.step_seconds * (1 + 1e-9)


def test_one_rank_alone_is_as_fast_as_its_computation() -> None:
    trace = load_trace("vgg16")
    costs = Costs(Cluster.regular(4, 1), {}, LINKS)
    for row in simulate_scaling(trace, costs, [1], choices(*PLANNER_NAMES)):
        assert row.step_seconds == pytest.approx(trace.compute_seconds)
        assert row.speedup == pytest.approx(1)
        assert row.efficiency == pytest.approx(1)


def test_measured_where_measured_and_by_formula_elsewhere() -> None:
    trace = load_trace("alexnet")
    costs = Costs(Cluster.regular(4, 1), MEASURED, LINKS)
    rows = simulate_scaling(trace, costs, [2, 4, 8], choices("optimal"))
    assert [row.costs for row in rows] == ["formula", "measured", "formula"]
    # Nobody has measured reduce-scatter and all-gather here.
    (row,) = simulate_scaling(trace, costs, [4], choices("pipelined"))
    assert row.costs == "formula"
    with pytest.raises(
        CostError, match="4 nodes with 1 rank each and 8 nodes with 1 rank each are asked"
    ):
        simulate_scaling(trace, Costs(Cluster.regular(4, 1), MEASURED), [8], choices("optimal"))


def test_unequal_nodes_cannot_be_multiplied() -> None:
    costs = Costs(Cluster((2, 1)), MEASURED, LINKS)
    trace = load_trace("alexnet")
    assert simulate_scaling(trace, costs, [2], choices("optimal"))[0].ranks == 3
    with pytest.raises(CostError, match=r"\(2, 1\), so 4 such nodes are not defined"):
        simulate_scaling(trace, costs, [4], choices("optimal"))


def test_planners_by_text_with_their_options() -> None:
    choice = PlannerChoice.parse("fixed:cap_bytes=4194304,last_bytes=65536")
    assert choice == PlannerChoice("fixed", {"cap_bytes": 4194304, "last_bytes": 65536})
    assert str(choice) == "fixed:cap_bytes=4194304,last_bytes=65536"
    assert PlannerChoice.parse("mgwfbp:variant=caffe").options == {"variant": "caffe"}
    for text in ("fixed:cap_bytes", "fixed:=3", "fixed:cap_bytes="):
        with pytest.raises(PlanError, match="option=value"):
            PlannerChoice.parse(text)
    trace, costs = step_of([1, 2]), Costs(Cluster.regular(4, 1), MEASURED)
    for text, complaint in (("optimum", "no planner 'optimum'"), ("ddp:size=3", "no option")):
        with pytest.raises(PlanError, match=complaint):
            simulate_scaling(trace, costs, [4], choices(text))


@pytest.mark.parametrize("name", ["planner", "trace", "costs", "gradients", "lane", "self"])
@pytest.mark.parametrize("planner", PLANNER_NAMES)
def test_arguments_of_ours_are_no_options_of_planners(planner: str, name: str) -> None:
    trace, costs = step_of([1, 2]), Costs(Cluster.regular(4, 1), {}, LINKS)
    with pytest.raises(PlanError, match=f"'{planner}' has no option '{name}'; it takes"):
        simulate_scaling(trace, costs, [4], choices(f"{planner}:{name}=3"))


def test_numbers_of_thousands_of_digits_are_refused() -> None:
    assert PlannerChoice.parse("ddp:cap_bytes=" + "9" * 18).options == {"cap_bytes": 10**18 - 1}
    with pytest.raises(PlanError, match=r"cap_bytes='999.*999' of planner 'ddp' is too large"):
        PlannerChoice.parse("ddp:cap_bytes=" + "9" * 5000)


def test_what_planners_may_use_is_passed_on() -> None:
    trace = step_of([1000] * 8)
    costs = Costs(Cluster.regular(4, 1), MEASURED, LINKS)
    (limited, narrow) = (
        simulate_scaling(trace, costs, [4], choices("optimal"), allowed=allowed)[0]
        for allowed in (
            Allowed(max_bucket_bytes=4000),
            Allowed(wires=("bfloat16",), collectives=("ring",)),
        )
    )
    assert limited.num_buckets == 8
    assert narrow.costs == "formula"


def rows_of(variation: Variation | None = None) -> list[ScalingRow]:
    costs = Costs(Cluster.regular(4, 1), {}, LINKS)
    planners = choices("wfbp", "optimal")
    return simulate_scaling(load_trace("resnet50"), costs, [1, 4], planners, variation=variation)


@pytest.mark.parametrize(("suffix", "head"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_plots_are_the_same_again(suffix: Literal["svg", "png"], head: bytes) -> None:
    rows = rows_of(Variation(compute_jitter=0.05, num_steps=50))
    drawn, again = (plot_scaling(rows, "resnet50", suffix) for _ in range(2))
    assert drawn == again and drawn.startswith(head)
    if suffix == "svg":
        text = drawn.decode()
        assert all(word in text for word in (">wfbp<", ">optimal<", ">nodes<", ">resnet50<"))


def test_a_plots_suffix_says_what_it_is() -> None:
    assert [plot_kind(Path(name)) for name in ("a.svg", "b.PNG")] == ["svg", "png"]
    with pytest.raises(SlipstreamError, match=r"plot\.pdf ends in neither"):
        plot_kind(Path("plot.pdf"))


def test_a_setting_of_all_planners_is_no_option_of_one() -> None:
    choice = PlannerChoice.parse("optimal:tolerance=0.1")
    with pytest.raises(PlanError, match="'tolerance' is not an option of planner 'optimal'"):
        Allowed().plan(choice, step_of([1]), costs_of(Line(0.0, 0.0)))
