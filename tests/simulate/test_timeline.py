"""The Chrome trace: rows, times in microseconds, files written whole."""

from __future__ import annotations

import json
from typing import Any

from slipstream.costs import Line
from slipstream.plan import plan_step
from slipstream.simulate import StepSimulation, chrome_trace, simulate_step
from steps import costs_of, step_of


def simulated(planner: str) -> StepSimulation:
    trace = step_of([25, 25, 50], forward_seconds=2.0, input_seconds=1.0, update_seconds=0.5)
    costs = costs_of(Line(0.5, 0.01))
    return simulate_step(trace, costs, plan_step(planner, trace, costs))


def rows_of(document: dict[str, Any], process: int) -> dict[str, list[tuple[str, float, float]]]:
    """Row by name: (event, start, duration), in microseconds."""
    mine = [event for event in document["traceEvents"] if event["pid"] == process]
    names = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
    rows: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for event in mine:
        if event["ph"] == "X":
            rows[names[event["tid"]]].append((event["name"], event["ts"], event["dur"]))
    return rows


def test_rows_are_those_of_the_step() -> None:
    document = chrome_trace({"wfbp, 4 nodes": simulated("wfbp")})
    assert rows_of(document, 1) == {
        "input": [("input", 0.0, 1e6)],
        "forward": [("forward", 1e6, 2e6)],
        "backward": [("backward", 3e6, 3e6)],
        "update": [("update", 9.5e6, 0.5e6)],
        "wait": [("wait for averages", 6e6, 3.5e6)],
        "reduce 0": [("reduce 0", 4e6, 1.5e6)],
        "reduce 1": [("waits for the channel", 5e6, 0.5e6), ("reduce 1", 5.5e6, 1.5e6)],
        "reduce 2": [("waits for the channel", 6e6, 1e6), ("reduce 2", 7e6, 2.5e6)],
    }
    about = next(e["args"] for e in document["traceEvents"] if e["name"] == "reduce 2")
    assert about == {
        "bytes": 200,
        "collective": "native",
        "wire": "float32",
        "gradients": ("g2",),
    }


def test_several_steps_are_processes_and_the_document_is_json() -> None:
    steps = {planner: simulated(planner) for planner in ("single", "pipelined")}
    document = json.loads(json.dumps(chrome_trace(steps), allow_nan=False))
    labels = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert [label.split(":")[0] for label in labels] == ["single", "pipelined"]
    assert "gather 0" in rows_of(document, 2)
    for event in document["traceEvents"]:
        assert event["ph"] == "M" or event["dur"] > 0
