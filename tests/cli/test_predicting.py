"""`slipstream plan` and `slipstream simulate`: what they print, write and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.costs import ClusterSpec
from slipstream.plan import Plan
from slipstream.simulate import load_trace

ROOT = Path(__file__).parents[2]
TEN_GIGABIT = ROOT / "examples" / "clusters" / "10gbe.json"


def question(trace: object = "resnet50", cluster: object = TEN_GIGABIT) -> list[object]:
    return ["--trace", trace, "--cluster", cluster]


@pytest.mark.parametrize("cluster", ["10gbe", "100gbe"])
def test_example_clusters_are_read(cluster: str) -> None:
    spec = ClusterSpec.load(ROOT / "examples" / "clusters" / f"{cluster}.json")
    assert "not measured" in spec.note


def test_a_plan_is_explained_and_written(slipstream: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = slipstream("plan", *question(), "--nodes", 64, "--output", path)
    assert (code, err) == (0, "")
    plan = Plan.load(path)
    assert (plan.model, plan.nodes, plan.planner) == ("resnet50", 64, "optimal")
    assert f"resnet50 on 64 nodes with 1 rank each, planner optimal: {len(plan.reduce)}" in out
    for index in range(len(plan.reduce)):
        assert f"reduce {index} (" in out
    for words in ("are hidden", "are exposed", "the step would end", "No plan takes less than"):
        assert words in out
    for words in ("predicted step", "bound: compute", "bound: network", "bound: last bucket"):
        assert words in out
    assert f"plan written to {path}" in out
    assert "\nchannel " in out


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        ("plan", "--output", "plan.json"),
        ("simulate", "--plot", "plot.svg"),
        ("simulate", "--plot", "plot.png"),
        ("simulate", "--timeline", "timeline.json"),
    ],
)
def test_a_file_that_exists_is_replaced_only_when_asked(
    slipstream: Any, tmp_path: Path, command: str, option: str, name: str
) -> None:
    path = tmp_path / name
    path.write_text("years of work")
    arguments = [command, *question(), option, path]
    code, out, err = slipstream(*arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"{path} exists and was not overwritten; choose another {option}, or" in err
    assert "--overwrite" in err and path.read_text() == "years of work"
    assert slipstream(*arguments, "--overwrite")[0] == 0
    assert path.read_bytes() != b"years of work" and list(tmp_path.iterdir()) == [path]


def test_many_buckets_are_explained_in_part(slipstream: Any) -> None:
    code, out, _ = slipstream("plan", *question(), "--planner", "wfbp")
    assert code == 0
    assert "reduce 39 (" in out and "reduce 40 (" not in out
    assert "and 121 more (--json has them all)" in out


def test_a_plan_as_json_is_alone_on_standard_output(slipstream: Any) -> None:
    code, out, err = slipstream("plan", *question(), "--planner", "pipelined", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    plan = Plan.model_validate_json(json.dumps(document["plan"]))
    assert plan.gather is not None
    halves = [bucket["half"] for bucket in document["buckets"]]
    assert halves == ["reduce"] * len(plan.reduce) + ["gather"] * len(plan.gather)
    assert document["step_seconds"] == plan.predicted_step_seconds
    assert document["lower_bounds"][-1]["step_seconds"] == plan.lower_bound_seconds
    assert document["buckets"][0].keys() >= {"text", "merge_seconds", "ready_seconds"}
    assert document["buckets"][-1]["merge_seconds"] is None


def test_planners_limits_and_wires_reach_the_plan(slipstream: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ["--max-bucket-bytes", 2**24, "--wire", "bfloat16", "--output", path]
    assert slipstream("plan", *question(), *options)[0] == 0
    plan = Plan.load(path)
    assert max(bucket.bytes for bucket in plan.reduce) <= 2**24
    assert {bucket.wire for bucket in plan.reduce} == {"bfloat16"}
    fixed = ["--planner", "fixed:cap_bytes=1048576,first_bytes=1048576", "--output", path]
    fixed += ["--overwrite"]
    assert slipstream("plan", *question(), *fixed)[0] == 0
    assert len(Plan.load(path).reduce) > 40


def test_a_simulation_is_a_table_of_every_planner(slipstream: Any) -> None:
    code, out, err = slipstream("simulate", *question(), "--nodes", "4,16")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "resnet50" in lines[0] and "253 ms" in lines[0]
    assert lines[1].split()[:5] == ["nodes", "ranks", "planner", "buckets", "step"]
    rows = [line.split()[:3] for line in lines[2:12]]
    planners = ["wfbp", "single", "ddp", "mgwfbp", "optimal"]
    assert rows == [[nodes, nodes, planner] for nodes in ("4", "16") for planner in planners]
    assert "with --tolerance 0 no plan" in out
    _, exact, _ = slipstream("simulate", *question(), "--nodes", "4,16", "--tolerance", 0)
    assert "with --tolerance 0 no plan" not in exact


def test_varying_steps_have_percentiles_and_a_seed(slipstream: Any) -> None:
    vary = ["--jitter", 0.05, "--stragglers", "0.01x3", "--network-jitter", 0.1, "--steps", 200]
    arguments = ["simulate", *question(), "--planner", "optimal", *vary]
    first, again, other = (slipstream(*arguments, "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == again != other
    assert first.splitlines()[1].split()[-4:] == ["p50", "p95", "p99", "costs"]
    document = json.loads(slipstream(*arguments, "--json")[1])
    assert document["variation"]["straggler_slowdown"] == 3.0
    drawn = document["rows"][0]["percentiles"]
    assert document["rows"][0]["step_seconds"] < drawn["p50"] <= drawn["p95"] <= drawn["p99"]


def test_plot_and_timeline_are_written(slipstream: Any, tmp_path: Path) -> None:
    plot, timeline = tmp_path / "plot.svg", tmp_path / "timeline.json"
    drawn = ["--plot", plot, "--timeline", timeline, "--json"]
    planners = ["--planner", "ddp", "--planner", "optimal"]
    code, out, err = slipstream("simulate", *question(), "--nodes", "4,8", *planners, *drawn)
    assert code == 0
    assert [row["nodes"] for row in json.loads(out)["rows"]] == [4, 4, 8, 8]
    assert str(plot) in err and str(timeline) in err
    assert ">ddp<" in plot.read_text()
    events = json.loads(timeline.read_text())["traceEvents"]
    steps = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [step.split(":")[0] for step in steps] == ["ddp, 8 nodes", "optimal, 8 nodes"]


def test_measured_and_formula_costs_are_told_apart(slipstream: Any, tmp_path: Path) -> None:
    spec = json.loads(TEN_GIGABIT.read_text())
    spec["costs"] = [{"collective": "native", "points": [[1024, 0.002], [1048576, 0.004]]}]
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(spec))
    arguments = ["simulate", *question(cluster=path), "--planner", "optimal"]
    _, out, err = slipstream(*arguments, "--nodes", "8,16")
    assert [line.split()[-1] for line in out.splitlines()[2:4]] == ["formula", "measured"]
    note = (
        "Costs were measured on 16 nodes; those on {} are by formula from the links, not measured,"
        " and may be off."
    )
    assert err == f"slipstream: note: {note.format('8 nodes')}\n"
    assert slipstream(*arguments)[2] == ""
    _, out, err = slipstream(*arguments, "--nodes", "64,1,8", "--json")
    assert json.loads(out)["warnings"] == [note.format("1, 8 and 64 nodes")]
    assert err.count("\n") == 1
    planned = ["plan", *question(cluster=path)]
    code, out, err = slipstream(*planned, "--nodes", "8", "--json")
    assert json.loads(out)["warnings"] == [note.format("8 nodes")]
    assert err == f"slipstream: note: {note.format('8 nodes')}\n"
    assert slipstream(*planned)[2] == ""
    _, out, err = slipstream(*planned, "--planner", "pipelined")
    assert "What pipelined would use (native) was not measured on 16 nodes: those" in err
    del spec["links"]
    path.write_text(json.dumps(spec))
    code, out, err = slipstream(*arguments, "--nodes", "8")
    assert (code, out) == (1, "")
    assert "measured on 16 nodes with 1 rank each and 8 nodes" in err


def test_a_stored_plan_is_simulated_as_it_is(slipstream: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert slipstream("plan", *question(), "--nodes", 64, "--output", path)[0] == 0
    stored = ["simulate", *question(), "--plan", path]
    code, out, _ = slipstream(*stored, "--nodes", 64, "--json")
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row["planner"] == "plan.json (optimal)"
    assert row["step_seconds"] == Plan.load(path).predicted_step_seconds
    code, _, err = slipstream(*stored)
    assert code == 1
    assert f"{path}: The plan was made for 64 nodes with 1 rank each" in err
    assert "this cluster has 16 nodes with 1 rank each" in err
    other = ["simulate", *question("resnet152"), "--plan", path, "--nodes", 64]
    code, _, err = slipstream(*other)
    assert code == 1
    assert f"{path}: The plan was made for the model 'resnet50' and this is 'resnet152'" in err


def without(document: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != field}


def trace_with(**changes: Any) -> dict[str, Any]:
    document = json.loads(load_trace("alexnet").to_json())
    return {**document, "parameters_sha256": None, **changes}


def gradients_with(index: int, **changes: Any) -> list[dict[str, Any]]:
    gradients: list[dict[str, Any]] = trace_with()["gradients"]
    gradients[index] = {**gradients[index], **changes}
    return gradients


DAMAGED_TRACES = {
    "cut": ("{", "the document"),
    "empty": ("", "the document"),
    "foreign": ({"traceEvents": []}, "model"),
    "incomplete": (without(trace_with(), "forward_seconds"), "forward_seconds"),
    "absurd": (trace_with(forward_seconds=1e308), "forward_seconds"),
    "absurd gradient": (trace_with(gradients=gradients_with(-1, ready_seconds=2e6)), "ready_sec"),
    "absurd spread": (trace_with(input_spread_seconds=1e300), "input_spread_seconds"),
    "absurd size": (trace_with(gradients=gradients_with(0, numel=10**400)), "numel"),
    "infinite": (json.dumps(trace_with(update_seconds=1)).replace(": 1,", ": 1e999,"), "seconds"),
    "unknown field": (trace_with(forward_ms=3), "forward_ms"),
    "negative": (trace_with(gradients=gradients_with(2, ready_seconds=-1.0)), "ready_seconds"),
    "not a number": (trace_with(update_seconds="NaN"), "update_seconds"),
    "out of order": (trace_with(gradients=gradients_with(2, ready_seconds=1e-9)), "is ready at"),
    "no order": (trace_with(gradients=[]), "gradients"),
    "no time": (
        trace_with(gradients=[{**g, "ready_seconds": 0.0} for g in trace_with()["gradients"]]),
        "the backward takes no time",
    ),
    "other parameters": (
        trace_with(
            parameters_sha256=load_trace("alexnet").parameters_sha256,
            gradients=gradients_with(0, numel=7),
        ),
        "parameters_sha256",
    ),
}


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("case", DAMAGED_TRACES)
def test_damaged_traces_are_refused_by_file_and_field(
    slipstream: Any, tmp_path: Path, command: str, case: str
) -> None:
    content, field = DAMAGED_TRACES[case]
    path = tmp_path / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    code, out, err = slipstream(command, *question(path))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert str(path) in err and field in err


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"nodes": 0}, "nodes"),
        ({"links": {"inter": {"latency_seconds": -1.0, "seconds_per_byte": 0.0}}}, "latency"),
        ({"links": {"inter": {"latency_seconds": 1e7, "seconds_per_byte": 0.0}}}, "latency"),
        ({"links": {"inter": {"latency_seconds": 0.0, "seconds_per_byte": 1e200}}}, "per_byte"),
        ({"nodes": 10**400}, "nodes"),
        ({"format": "slipstream-trace/1"}, "format"),
        ({"costs": [{"collective": "native", "points": []}]}, "points"),
        ({"costs": [{"collective": "native", "points": [[1024, 1e308]]}]}, "points.0.1"),
        ({"costs": [{"collective": "native", "points": [[2**60, 1.0]]}]}, "points.0.0"),
        ({"links": None}, "costs and links are both missing"),
        ({"speed": 1}, "speed"),
    ],
)
def test_damaged_clusters_are_refused_by_file_and_field(
    slipstream: Any, tmp_path: Path, command: str, changes: dict[str, Any], field: str
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({**json.loads(TEN_GIGABIT.read_text()), **changes}))
    code, out, err = slipstream(command, *question(cluster=path))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert str(path) in err and field in err


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_what_is_just_allowed_is_predicted_in_numbers(
    slipstream: Any, tmp_path: Path, command: str
) -> None:
    longest, trace, cluster = 1e6, tmp_path / "trace.json", tmp_path / "cluster.json"
    gradients = [{**g, "ready_seconds": longest} for g in trace_with()["gradients"]]
    times = dict.fromkeys(("input_seconds", "forward_seconds", "update_seconds"), longest)
    trace.write_text(json.dumps(trace_with(**times, gradients=gradients)))
    link = {"latency_seconds": longest, "seconds_per_byte": 1, "reduce_seconds_per_byte": 1}
    spec = json.loads(TEN_GIGABIT.read_text())
    cluster.write_text(json.dumps({**spec, "links": {"inter": link}, "nodes": 2**20}))
    code, out, _ = slipstream(command, *question(trace, cluster))
    assert code == 0
    assert {"nan", "inf", "-"}.isdisjoint(out.lower().split())


def test_damaged_plans_are_refused_by_file_and_field(slipstream: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"planner": "optimal", "reduce": [{"gradients": [], "bytes": 0}]}')
    code, _, err = slipstream("simulate", *question(), "--plan", path)
    assert (code, err.count("\n")) == (1, 1)
    assert str(path) in err and "reduce.0.gradients" in err


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_doubtful_traces_are_pointed_out(slipstream: Any, tmp_path: Path, command: str) -> None:
    gradients = [
        {**g, "ready_seconds": 0.1, "needed_seconds": 0.0} for g in trace_with()["gradients"]
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace_with(forward_seconds=0.0, gradients=gradients)))
    code, _, err = slipstream(command, *question(path))
    assert code == 0
    assert "The forward takes no time at all" in err
    assert "All gradients become ready at the end of backward" in err
    code, out, _ = slipstream(command, *question(path), "--json")
    assert len(json.loads(out)["warnings"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "--nodes", "4,x"], "'x' in '4,x' is no number of nodes"),
        (["simulate", "--nodes", "0"], "is no number of nodes"),
        (["simulate", "--stragglers", "often"], "--stragglers 'often' is no share"),
        (["simulate", "--plan", "plan.json", "--planner", "ddp"], "leave out --planner"),
        (["simulate", "--plot", "a.svg", "--timeline", "a.svg"], "name one file, a.svg"),
        (["simulate", "--wire", "int8"], "there is no wire 'int8'"),
        (["plan", "--collective", "hitopk"], "there is no collective 'hitopk'"),
        (["plan", "--tolerance", "-1"], "--tolerance"),
        (["plan", "--max-bucket-bytes", "0"], "--max-bucket-bytes"),
        (["plan", "--nodes", "1000000000000"], "--nodes"),
    ],
)
def test_wrong_usage_is_refused_with_exit_code_2(
    slipstream: Any, arguments: list[str], words: str
) -> None:
    code, out, err = slipstream(arguments[0], *question(), *arguments[1:])
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--planner", "optimum"], "no planner 'optimum'"),
        (["plan", "--planner", "ddp:cap"], "'ddp:cap' is no planner"),
        (["plan", "--planner", "ddp", "--max-bucket-bytes", "9"], "max_bucket_bytes"),
        (
            ["plan", "--collective", "native", "--wire", "float16"],
            "'native' does not send float16",
        ),
        (["plan", "--output", "/nowhere/plan.json"], "/nowhere, where plan.json shall go, is no"),
        (["simulate", "--plot", "plot.pdf"], "plot.pdf ends in neither .png nor .svg"),
        (["simulate", "--jitter", "5"], "compute_jitter is 5.0"),
        (["simulate", "--stragglers", "2"], "straggler_share is 2.0"),
        (["simulate", "--stragglers", "0.1x1e308"], "straggler_slowdown is 1e+308; it is a factor"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    slipstream: Any, arguments: list[str], words: str
) -> None:
    code, out, err = slipstream(arguments[0], *question(), *arguments[1:])
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert words in err


@pytest.mark.processes
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_predicting_does_without_torch(command: str) -> None:
    code = (
        f"import sys; sys.argv = ['slipstream', {command!r}, *{list(map(str, question()))!r}]\n"
        "from slipstream.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert {"torch", "torchvision", "matplotlib"}.isdisjoint(run.stderr.split())
