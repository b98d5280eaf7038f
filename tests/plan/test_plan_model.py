"""Plans as values and as files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cluster import Cluster
from slipstream.costs import Density
from slipstream.errors import PlanError
from slipstream.plan import Bucket, Gradient, Plan
from slipstream.plan.model import parameters_sha256

PLAN = Plan(
    planner="fixed",
    model="two layers",
    nodes=2,
    ranks_per_node=(2, 1),
    reduce=(Bucket(gradients=("b.weight", "b.bias"), bytes=12), Bucket(gradients=("a",), bytes=4)),
)
GRADIENTS = [Gradient("b.weight", 2), Gradient("b.bias", 1), Gradient("a", 1)]


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json(), encoding="utf-8")
    assert Plan.load(path) == PLAN
    assert '"format": "slipstream-plan/1"' in PLAN.to_json()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (('"planner"', '"plannner"'), "planner"),
        (('"bytes": 12', '"bytes": "twelve"'), "reduce.0.bytes"),
        (('"bytes": 12', '"bytes": -1'), "reduce.0.bytes"),
        (('"native"', '"carrier pigeon"'), "reduce.0.collective"),
        (("slipstream-plan/1", "slipstream-plan/9"), "format"),
        (('"nodes": 2', '"nodes": 0'), "nodes"),
        (('"nodes": 2', '"nodes": 3'), "lists 2 nodes, and nodes is 3"),
        (('"nodes": 2', f'"nodes": {10**30}'), "nodes"),
        (("2,\n  1", "2,\n  0"), "ranks_per_node"),
        (('"predicted_step_seconds": null', '"predicted_step_seconds": -1.0'), "predicted_step"),
        (("{", "{,"), "the document"),
    ],
)
def test_a_damaged_plan_is_refused_with_file_and_field(
    change: tuple[str, str], field: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json().replace(*change, 1), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value) and field in str(caught.value)


def test_a_missing_or_binary_plan_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json cannot be read"):
        Plan.load(tmp_path / "nowhere.json")
    (tmp_path / "noise.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"noise\.json cannot be read"):
        Plan.load(tmp_path / "noise.json")


def test_a_plan_covers_its_model_exactly() -> None:
    PLAN.check_covers(GRADIENTS)
    with pytest.raises(PlanError, match="for 'two layers' lacks the trainable parameter 'c' of"):
        PLAN.check_covers([*GRADIENTS, Gradient("c", 1)])
    with pytest.raises(PlanError, match=r"for 'two layers' holds 'a', .* of 'one layer';"):
        PLAN.check_covers(GRADIENTS[:2], "one layer")
    twice = PLAN.model_copy(update={"reduce": (*PLAN.reduce, PLAN.reduce[1])})
    with pytest.raises(PlanError, match="'a' 2 times"):
        twice.check_covers(GRADIENTS)
    mixed = [GRADIENTS[0], Gradient("b.bias", 1, "float64"), GRADIENTS[2]]
    with pytest.raises(PlanError, match="Bucket 0 mixes float32 and float64"):
        PLAN.check_covers(mixed)


def test_a_dtype_that_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(PlanError, match="'steps' has dtype int64"):
        Gradient("steps", 1, "int64")


def test_gather_buckets_cover_the_model_too_and_travel_in_the_forward() -> None:
    text = PLAN.to_json().replace('"gather": null', '"gather": []')
    with pytest.raises(PlanError, match='wait must be "forward"'):
        Plan.from_json(text)
    pipelined = PLAN.model_copy(update={"wait": "forward", "gather": PLAN.reduce[::-1]})
    assert Plan.from_json(pipelined.to_json()) == pipelined
    pipelined.check_covers(GRADIENTS)
    short = pipelined.model_copy(update={"gather": PLAN.reduce[:1]})
    with pytest.raises(PlanError, match=r"gather of the plan for 'two layers' lacks .* 'a'"):
        short.check_covers(GRADIENTS)


def test_a_plan_for_another_model_or_cluster_is_refused_with_both_named() -> None:
    digest = parameters_sha256(GRADIENTS)
    plan = PLAN.model_copy(update={"parameters_sha256": digest})
    plan.check_made_for("two layers", digest, Cluster((2, 1)))
    with pytest.raises(PlanError, match="for the model 'two layers' and this is 'three layers'"):
        plan.check_made_for("three layers", "0" * 64, Cluster((2, 1)))
    with pytest.raises(PlanError, match=r"2 nodes with 2, 1 ranks and .* 4 nodes with 1 rank each"):
        plan.check_made_for("two layers", digest, Cluster.regular(4, 1))
    with pytest.raises(PlanError, match=r"this cluster has 1 node with 3 ranks;"):
        plan.check_made_for("two layers", digest, Cluster((3,)))


def test_collectives_and_sparse_wires_survive_the_file() -> None:
    wire = Density(density=0.01, values="bfloat16")
    bucket = Bucket(gradients=("a",), bytes=4, collective="hitopk", wire=wire)
    plan = PLAN.model_copy(update={"reduce": (bucket,)})
    assert Plan.from_json(plan.to_json()).reduce[0].wire == wire


@given(st.permutations(GRADIENTS))
def test_the_digest_says_which_model_whatever_the_order(order: list[Gradient]) -> None:
    assert parameters_sha256(order) == parameters_sha256(GRADIENTS)
    assert parameters_sha256(order[:2]) != parameters_sha256(GRADIENTS)


def test_fingerprints_are_those_of_what_travels_and_when() -> None:
    renamed = PLAN.model_copy(update={"planner": "by hand"})
    reordered = PLAN.model_copy(update={"reduce": PLAN.reduce[::-1]})
    assert renamed.fingerprint() == PLAN.fingerprint() != reordered.fingerprint()
