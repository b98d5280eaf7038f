"""`slipstream plan`, `simulate` and `probe` where a share of the elements may travel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LINKS = {
    "intra": {"latency_seconds": 1e-5, "seconds_per_byte": 1e-10},
    "inter": {"latency_seconds": 1e-4, "seconds_per_byte": 8e-8},
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    spec = {"format": "slipstream-cluster/1", "backend": "gloo", "nodes": 2, "ranks_per_node": 2}
    path.write_text(json.dumps({**spec, "links": LINKS}))
    return path


def test_a_plan_says_what_is_sent_sparsely_and_where_it_breaks_even(
    slipstream: Any, cluster: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    asked = ["plan", "--trace", "resnet50", "--cluster", cluster, "--collective", "torus"]
    code, out, _ = slipstream(*asked, "--density", 0.01, "--output", plan)
    assert code == 0
    assert "send 0.01 of the elements by hitopk;" in out
    assert "below a density of 50.0 %" in out
    buckets = json.loads(plan.read_text())["reduce"]
    sparse = [bucket for bucket in buckets if bucket["wire"] != "torus" and bucket["bytes"] > 2**20]
    wire = {"density": 0.01, "values": "float32", "selector": "exact"}
    assert sparse and all(bucket["wire"] == wire for bucket in sparse)
    code, again, _ = slipstream("simulate", *asked[1:5], "--plan", plan, "--json")
    assert code == 0
    dense = json.loads(slipstream(*asked, "--json")[1])["step_seconds"]
    assert json.loads(again)["rows"][0]["step_seconds"] < 0.3 * dense


def test_simulate_takes_densities_too(slipstream: Any, cluster: Path) -> None:
    asked = ["simulate", "--trace", "resnet50", "--cluster", cluster, "--planner", "optimal"]
    steps = [
        json.loads(slipstream(*asked, *options, "--json")[1])["rows"][0]["step_seconds"]
        for options in ([], ["--density", 0.01], ["--density", 0.01, "--dense", "*conv*"])
    ]
    assert steps[1] < steps[2] < steps[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--density", 0], "above 0 and at most 1"),
        (["--density", 1.5], "above 0 and at most 1"),
        (["--density", 0.01, "--sparse", "torus"], "'torus' is no sparse collective"),
        (["--density", 0.01, "--values", "float8"], "'float8' is no dtype of values"),
        (["--density", 0.01, "--dense", "nothing.*"], "'nothing.*' matches no gradient"),
        (["--density", 0.01, "--selector", "largest"], "'largest' is no selector; there are exact"),
        (["--dense", "*"], "--density, which says how large it is, is not given"),
        (["--sparse", "hitopk"], "--sparse says how a share of the elements is sent"),
        (["--values", "bfloat16"], "--values says how a share of the elements is sent"),
        (["--selector", "mstopk"], "--selector says how a share of the elements is sent"),
    ],
)
def test_what_cannot_be_is_refused(
    slipstream: Any, cluster: Path, options: list[object], said: str
) -> None:
    code, out, err = slipstream("plan", "--trace", "resnet50", "--cluster", cluster, *options)
    assert code != 0 and out == ""
    assert said in " ".join(err.replace("│", " ").split())


def test_a_probe_refuses_what_it_cannot_measure(slipstream: Any) -> None:
    code, _, err = slipstream("probe", "--density", 2)
    assert code != 0 and "above 0 and at most 1" in err
    code, _, err = slipstream("probe", "--density", 0.1, "--sparse", "ring")
    assert code != 0 and "hitopk" in err
    code, _, err = slipstream("probe", "--selector", "mstopk")
    assert code != 0 and "--density" in err
