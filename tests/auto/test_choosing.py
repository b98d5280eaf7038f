"""Auto where buckets may go several ways: what it probes, chooses and says, and what it refuses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piloted import PLANNED, TOLD, Trainer, reference, slow_links
from ranks import Rank, run_ranks
from slipstream.auto import GradientSync
from slipstream.auto.settings import AutoSettings
from slipstream.cluster import Cluster
from slipstream.costs import CostKey, Costs, Curve, Line
from slipstream.errors import CostError, PlanError
from slipstream.plan import Plan
from small_models import assert_matches, batch, loss_of, mlp


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "slipstream")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "slipstream"]


def known(**lines: Line) -> Costs:
    """Costs of all-reduces on two ranks; "direct_bfloat16" is direct with that wire."""
    measured: dict[CostKey, Curve] = {}
    for name, line in lines.items():
        collective, _, wire = name.partition("_")
        measured[collective, "all_reduce", wire or "float32"] = line  # type: ignore[index]
    return Costs(Cluster((2,)), measured)


def ways_of(plan: Plan) -> list[tuple[str, object]]:
    return [(bucket.collective, bucket.wire) for bucket in plan.reduce]


def test_buckets_go_the_cheapest_way_and_the_line_says_which_and_out_of_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first two travel together by the one with the rate, the last by the one that starts."""
    costs = known(native=Line(0.0, 0.4), ring=Line(4.0, 0.05), direct=Line(1.0, 0.2))
    options = {"costs": costs, "collectives": ["native", "ring", "direct"]}

    def train(rank: Rank) -> Trainer:
        return Trainer(rank, options).run(TOLD + 2)

    for trainer in run_ranks(train, 2):
        plan = trainer.sync.plan
        assert ways_of(plan) == [("ring", "float32"), ("ring", "float32")]
        assert trainer.sync.history.plans[-1].reason == lines(caplog)[0]
        for step, mine in enumerate(trainer.found):
            assert_matches(mine, reference(2, step, 1))
    (line,) = lines(caplog)
    assert line == (
        f"auto, after step {PLANNED}: ddp (1 bucket) -> optimal (2 buckets by ring), step "
        "predicted 1 min 35 s -> 1 min 11 s, measured 1 min 6 s -> 1 min 6 s "
        "(given costs: native, ring, direct)"
    )


def test_several_ways_in_one_plan_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    costs = known(native=Line(0.0, 0.4), ring=Line(9.0, 0.01), direct=Line(1.0, 0.1))
    options = {"costs": costs, "collectives": ["native", "ring", "direct"]}

    def train(rank: Rank) -> Plan:
        return Trainer(rank, options).run(TOLD).sync.plan

    first, second = run_ranks(train, 2)
    assert first == second
    ways = [name for name, _ in ways_of(first)]
    assert len(ways) == 2 and ways[-1] == "direct"
    counted = "2 buckets by direct" if ways[0] == "direct" else "2 buckets: 1 by ring, 1 by direct"
    assert f"optimal ({counted})" in lines(caplog)[0]


def test_rounded_wires_only_where_they_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    costs = known(native=Line(0.0, 0.4), direct=Line(0.0, 0.4), direct_bfloat16=Line(0.0, 0.1))
    named = {"costs": costs, "collectives": ["native", "direct"]}

    def train(rank: Rank) -> list[set[object]]:
        found = []
        for options in (named, {**named, "allow": ["float32", "bfloat16"]}):
            trainer = Trainer(rank, options).run(TOLD)
            found.append({wire for _, wire in ways_of(trainer.sync.plan)})
            trainer.sync.close()
        return found

    assert run_ranks(train, 2) == [[{"float32"}, {"bfloat16"}]] * 2
    assert "(given costs: native, direct)" in lines(caplog)[0]
    assert "(given costs: native, direct; with bfloat16 direct)" in lines(caplog)[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"collectives": ["native", "direct"], "allow": ["float32", "bfloat16"]},
            "(probed: native, direct; with bfloat16 direct)",
        ),
        ({"collectives": ["direct", "direct"]}, ""),
        ({"planner": "four_minutes"}, "(probed: hierarchical, ring)"),
        ({"planner": "pipelined"}, ""),
    ],
    ids=["two and a wire", "not the one in force", "four_minutes", "pipelined"],
)
def test_what_may_be_used_is_probed_beside_what_is_in_force(
    options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where `native`, by which auto begins, is not among it: plans are compared with that."""

    def train(rank: Rank) -> bool:
        model = mlp()
        given_options = {"probe_seconds": 0.05, "steps": 3, **options}
        sync = GradientSync(model, plan="auto", plan_options=given_options, group=rank.group)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if options.get("planner") == "pipelined":
            optimizer = sync.deferred(optimizer)
        for step in range(TOLD + 1):  # a round of a pipelined plan ends within the next one
            optimizer.zero_grad()
            loss_of(model, batch(rank.rank, step)).backward()
            optimizer.step()
        sync.close()
        return True

    assert all(run_ranks(train, 2))
    (line,) = [line for line in lines(caplog) if "auto, after" in line]
    assert "nothing better can be planned" not in line
    assert words in line and ("probed" in line) == bool(words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collectives": "torus"}, "collectives is 'torus'; it is a list"),
        ({"collectives": ["tours"]}, "holds 'tours', which there is not; did you mean 'torus'"),
        ({"collectives": ["hitopk"]}, "holds 'hitopk'"),
        ({"allow": ["int8"]}, "allow holds 'int8', which there is not; there are float32, "),
        ({"allow": "float32"}, "allow is 'float32'; it is a list"),
        ({"collectives": []}, "at least one collective"),
        ({"collectives": ["ring"], "allow": ["float16"]}, "'ring' does not send float16"),
        ({"planner": "pipelined", "collectives": ["direct"]}, "'pipelined' goes by native"),
        ({"planner": "pipelined", "allow": ["bfloat16"]}, "'pipelined' sends float32"),
        ({"planner": "four_minutes", "collectives": ["ring"]}, "by hierarchical and ring"),
    ],
)
def test_names_are_checked_when_the_engine_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        GradientSync(mlp(), plan="auto", plan_options=options)


def test_a_collective_that_the_cluster_cannot_carry_is_refused_at_once() -> None:
    def train(rank: Rank) -> None:
        options = {"collectives": ["native", "torus"]}
        GradientSync(
            mlp(), plan="auto", plan_options=options, group=rank.group, cluster=Cluster((2, 1))
        )

    with pytest.raises(PlanError, match="as many ranks on every node"):
        run_ranks(train, 3)


def test_a_collective_that_the_backend_lacks_is_refused_before_anything_is_measured() -> None:
    def on_gpus(*collectives: str) -> AutoSettings:
        settings = AutoSettings.of("auto", {"collectives": collectives})
        return settings.on(Cluster((2, 2)), "nccl", "cuda")

    assert on_gpus("native", "torus").collectives == ("native", "torus")
    with pytest.raises(PlanError, match="no collective 'halving_doubling' over NCCL"):
        on_gpus("native", "halving_doubling")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collectives": ["native", "direct"]}, "all_reduce by 'direct'"),
        ({"collectives": ["native", "ring"], "allow": ["float32", "bfloat16"]}, "ring with bf"),
        ({"collectives": ["ring"], "costs": known(ring=Line(1.0, 0.0))}, "all_reduce by 'native'"),
    ],
)
def test_given_costs_that_lack_what_may_be_used_are_refused_at_once(
    options: dict[str, Any], words: str
) -> None:
    costs = known(native=Line(1.0, 0.0), ring=Line(1.0, 0.0))

    def train(rank: Rank) -> None:
        GradientSync(mlp(), plan="auto", plan_options={"costs": costs, **options}, group=rank.group)

    with pytest.raises(CostError, match=words):
        run_ranks(train, 2)


def test_a_wire_that_no_collective_sends_is_no_fault_of_the_costs() -> None:
    settings = AutoSettings.of("auto", {"costs": slow_links(), "allow": ["float32", "bfloat16"]})
    assert settings.on(Cluster((2,))).costs == slow_links()


@given(
    st.integers(1, 20),
    st.floats(1e-4, 100.0),
    st.floats(0.1, 100.0),
    st.integers(1, 1000),
)
def test_the_time_of_a_probe_grows_with_the_ways_and_is_limited(
    num_ways: int, step_seconds: float, probe_seconds: float, probe_steps: int
) -> None:
    settings = AutoSettings(probe_seconds=probe_seconds, probe_steps=probe_steps)
    alone = settings.probe_budget_seconds(1, step_seconds)
    budget = settings.probe_budget_seconds(num_ways, step_seconds)
    assert alone == min(probe_seconds, probe_steps * step_seconds)
    assert alone <= budget <= settings.probe_budget_seconds(num_ways + 1, step_seconds)
    assert budget <= 4 * alone
    assert num_ways > 9 or budget == pytest.approx(alone * (num_ways + 2) / 3)
