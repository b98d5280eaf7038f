"""`slipstream plan` and `simulate` where there is a choice of collectives and wires."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LINKS = {"inter": {"latency_seconds": 1e-4, "seconds_per_byte": 1e-9}}
COSTS = [
    {"collective": "native", "startup_seconds": 0.01, "seconds_per_byte": 1e-9},
    {"collective": "direct", "startup_seconds": 0.001, "seconds_per_byte": 3e-9},
    {"collective": "direct", "wire": "bfloat16", "startup_seconds": 2e-3, "seconds_per_byte": 2e-9},
]


def question(
    folder: Path, costs: list[dict[str, Any]], *, with_links: bool = True, command: str = "plan"
) -> list[object]:
    """The beginning of a command about ResNet-50 on four nodes of which these costs are known."""
    spec = {
        "format": "slipstream-cluster/1",
        "backend": "gloo",
        "nodes": 4,
        "ranks_per_node": 1,
        "costs": costs,
    }
    path = folder / "cluster.json"
    path.write_text(json.dumps(spec | ({"links": LINKS} if with_links else {})))
    return [command, "--trace", "resnet50", "--cluster", path]


def test_each_bucket_says_what_carries_it_and_what_the_best_other_way_would_take(
    slipstream: Any, tmp_path: Path
) -> None:
    asked = question(tmp_path, COSTS)
    wires = ["--wire", "float32", "--wire", "bfloat16"]
    code, out, err = slipstream(*asked, *wires)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    reasons = [number for number, line in enumerate(lines) if line.startswith("  reduce ")]
    document = json.loads(slipstream(*asked, *wires, "--json")[1])
    assert len(reasons) == len(document["buckets"]) > 1
    for number, bucket in zip(reasons, document["buckets"], strict=True):
        own, other, last = bucket["ways"]
        assert own["seconds"] <= other["seconds"] <= last["seconds"]
        assert {own["costs"], other["costs"], last["costs"]} == {"measured"}
        assert lines[number + 1].startswith(f"      by {own['collective']}")
        assert "; the best of 2 others, " in lines[number + 1]
    assert {bucket["ways"][0]["collective"] for bucket in document["buckets"]} == {
        "native",
        "direct",
    }
    assert any(line.startswith("  Of 3 ways, ") for line in lines)


def test_where_there_is_one_way_nothing_is_said_of_others(slipstream: Any, tmp_path: Path) -> None:
    for options in ([], ["--planner", "pipelined"], ["--collective", "native"]):
        code, out, _ = slipstream(*question(tmp_path, COSTS[:1]), *options)
        assert code == 0
        assert "      by " not in out and "  Of " not in out


@pytest.mark.parametrize("name", ["native", "direct", "torus"])
def test_a_collective_can_be_forced_and_one_that_was_not_measured_is_told(
    slipstream: Any, tmp_path: Path, name: str
) -> None:
    code, out, err = slipstream(*question(tmp_path, COSTS), "--collective", name, "--json")
    assert code == 0
    plan = json.loads(out)["plan"]
    assert {(bucket["collective"], bucket["wire"]) for bucket in plan["reduce"]} == {
        (name, "float32")
    }
    told = "What optimal would use (torus) was not measured on 4 nodes: those costs are by formula"
    assert (told in err) == (name == "torus")


def test_what_was_not_measured_says_so_beside_what_was(slipstream: Any, tmp_path: Path) -> None:
    both = ["--collective", "native", "--collective", "torus"]
    code, out, err = slipstream(*question(tmp_path, COSTS), *both)
    assert code == 0
    assert "      by torus (by formula) in " in out
    assert "would use (torus) was not measured" in err


def test_on_other_nodes_the_collectives_of_the_file_are_compared_by_formula(
    slipstream: Any, tmp_path: Path
) -> None:
    code, out, err = slipstream(*question(tmp_path, COSTS), "--nodes", 16)
    assert code == 0
    assert "      by direct in " in out and "the other way, native, " in out
    assert "those on 16 nodes are by formula from the links" in err


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--collective", "torus"], "all_reduce by 'torus' with wire 'float32'"),
        (["--collective", "native", "--collective", "ring"], "all_reduce by 'ring'"),
        (["--collective", "direct", "--wire", "float16"], "by 'direct' with wire 'float16'"),
        (
            ["--wire", "float32", "--wire", "float16"],
            "Nobody has measured direct with float16 travelling",
        ),
        (["--planner", "pipelined", "--collective", "direct"], "'pipelined' goes by native"),
        (["--planner", "four_minutes", "--collective", "native"], "by hierarchical and ring"),
        (["--planner", "pipelined", "--wire", "bfloat16"], "'pipelined' sends float32"),
        (["--collective", "native", "--wire", "bfloat16"], "'native' does not send bfloat16"),
    ],
)
def test_what_nobody_knows_the_cost_of_is_one_sentence(
    slipstream: Any, tmp_path: Path, command: str, options: list[str], words: str
) -> None:
    asked = question(tmp_path, COSTS, with_links=False, command=command)
    code, out, err = slipstream(*asked, *options)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert words in err


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_what_is_asked_for_and_goes_with_nothing_else_is_told(
    slipstream: Any, tmp_path: Path, command: str
) -> None:
    asked = question(tmp_path, COSTS, command=command)
    both = ["--collective", "native", "--collective", "direct"]
    code, _, err = slipstream(*asked, *both, "--wire", "bfloat16")
    assert code == 0
    assert err == "slipstream: note: native carries nothing: it sends float32 only.\n"
    code, _, err = slipstream(*asked, *both[:2], "--wire", "float32", "--wire", "bfloat16")
    assert code == 0
    assert "bfloat16 is allowed and never travels: native cannot send it.\n" in err


def test_the_rule_of_four_minutes_is_explained_by_its_own_costs(
    slipstream: Any, tmp_path: Path
) -> None:
    code, out, _ = slipstream(*question(tmp_path, COSTS), "--planner", "four_minutes")
    assert code == 0
    assert "(by formula) in " in out and "native" in out


def test_the_same_name_twice_is_once(slipstream: Any, tmp_path: Path) -> None:
    twice = ["--collective", "native", "--collective", "native"]
    code, out, _ = slipstream(*question(tmp_path, COSTS), *twice)
    assert code == 0
    assert "      by " not in out
