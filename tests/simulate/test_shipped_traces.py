"""The shipped traces: sizes are the architectures', times the ones that their notes name."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from slipstream.cluster import Cluster
from slipstream.costs import Costs, Link, Links
from slipstream.errors import TraceError
from slipstream.plan import plan_step
from slipstream.simulate import load_trace, shipped_traces
from slipstream.trace import Trace

# Tensors, parameters, batch, forward + backward in seconds.
SHIPPED = {
    "alexnet": (16, 61_100_840, 128, 0.0672),
    "bert_base": (206, 110_106_428, 64, 0.305),
    "densenet201": (604, 20_013_928, 64, 0.361),
    "googlenet": (187, 13_004_888, 64, 64 / 81.68),
    "inception_v4": (449, 42_679_816, 128, 0.611),
    "resnet50": (161, 25_557_032, 64, 64 / 253.1),
    "resnet152": (467, 60_192_808, 128, 0.883),
    "transformer": (253, 63_082_496, 64, 0.178),
    "vgg16": (32, 138_357_544, 32, 0.375),
    "vgg19": (38, 143_667_240, 32, 0.476),
}
NO_TIME_PUBLISHED = {"alexnet", "transformer", "vgg16", "vgg19"}
GENERATOR = Path(__file__).parents[2] / "benchmarks" / "generate_traces.py"


def test_all_are_there_and_small() -> None:
    assert set(shipped_traces()) == set(SHIPPED)
    folder = files("slipstream").joinpath("traces")
    sizes = [len(folder.joinpath(f"{name}.json").read_bytes()) for name in SHIPPED]
    assert max(sizes) < 100_000 and sum(sizes) < 400_000


@pytest.mark.parametrize("name", SHIPPED)
def test_sizes_and_times(name: str) -> None:
    trace = load_trace(name)
    tensors, parameters, batch, compute = SHIPPED[name]
    assert (trace.model, trace.batch_size) == (name, batch)
    assert len(trace.gradients) == tensors
    assert sum(gradient.numel for gradient in trace.gradients) == parameters
    assert trace.compute_seconds == pytest.approx(compute, rel=1e-6)
    assert trace.forward_seconds == pytest.approx(trace.backward_seconds / 2, rel=1e-6)
    assert trace.parameters_sha256 is not None
    assert trace.warnings() == ()
    assert "Generated" in trace.note
    assert ("none is published" in trace.note) == (name in NO_TIME_PUBLISHED)


@pytest.mark.parametrize("name", SHIPPED)
def test_gradients_are_10_us_apart_or_more_and_needed_in_reverse(name: str) -> None:
    trace = load_trace(name)
    before = 0.0
    for gradient in trace.gradients:
        assert gradient.ready_seconds - before >= 10e-6 - 2e-9
        before = gradient.ready_seconds
    needed = [gradient.needed_seconds for gradient in trace.gradients]
    assert None not in needed
    first, last = needed[0] or 0.0, needed[-1] or 0.0
    assert first > 0.5 * trace.forward_seconds
    assert last < 0.01 * trace.forward_seconds


@pytest.mark.processes
def test_the_generator_gives_the_shipped_files() -> None:
    command = [sys.executable, str(GENERATOR), "--check", "--only", "alexnet", "resnet50"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = load_trace("alexnet")
    for path in (Path("mine.json"), Path("folder") / "alexnet"):
        path.parent.mkdir(exist_ok=True)
        trace.model_copy(update={"note": "mine"}).save(path)
        assert load_trace(str(path)).note == "mine"
    # A file beside does not shadow a shipped name.
    Path("alexnet").write_text("not a trace")
    assert load_trace("alexnet") == trace
    with pytest.raises(TraceError, match="did you mean 'resnet50'"):
        load_trace("resnet5")
    with pytest.raises(TraceError, match="There is no shipped trace ''"):
        load_trace("")
    with pytest.raises(TraceError, match=r"missing\.json cannot be read"):
        load_trace("missing.json")


def scaled_to(trace: Trace, backward_seconds: float) -> Trace:
    """The trace with all times in proportion; nearly what the generator makes for that time."""
    factor = backward_seconds / trace.backward_seconds
    return trace.model_copy(
        update={
            "forward_seconds": trace.forward_seconds * factor,
            "gradients": tuple(
                gradient.model_copy(update={"ready_seconds": gradient.ready_seconds * factor})
                for gradient in trace.gradients
            ),
        }
    )


# An independent simulation of the same architectures: model, backward seconds, ring workers,
# (latency, seconds a byte); then the steps by wfbp, single, ddp, mgwfbp and the optimum.
TEN_GIGABIT, HUNDRED_GIGABIT = (30e-6, 0.8e-9), (10e-6, 0.1e-9)
INDEPENDENT = [
    ("resnet50", 0.165, 16, TEN_GIGABIT, (0.381, 0.402, 0.263, 0.248, 0.248)),
    ("resnet50", 0.165, 64, TEN_GIGABIT, (0.852, 0.412, 0.267, 0.265, 0.261)),
    ("resnet50", 0.165, 256, TEN_GIGABIT, (2.709, 0.426, 0.322, 0.426, 0.298)),
    ("resnet50", 0.165, 1024, TEN_GIGABIT, (10.13, 0.472, 0.553, 0.472, 0.390)),
    ("resnet50", 0.165, 256, HUNDRED_GIGABIT, (0.924, 0.273, 0.255, 0.273, 0.253)),
    ("resnet152", 0.589, 64, TEN_GIGABIT, (2.439, 1.266, 0.908, 0.887, 0.887)),
    ("resnet152", 0.589, 256, TEN_GIGABIT, (7.823, 1.283, 0.920, 1.283, 0.899)),
    ("resnet152", 0.589, 1024, TEN_GIGABIT, (29.34, 1.330, 1.293, 1.330, 0.984)),
    ("densenet201", 0.24, 64, TEN_GIGABIT, (2.529, 0.490, 0.394, 0.364, 0.364)),
    ("densenet201", 0.24, 256, TEN_GIGABIT, (9.489, 0.503, 0.406, 0.446, 0.376)),
    ("densenet201", 0.24, 1024, TEN_GIGABIT, (37.3, 0.549, 0.494, 0.549, 0.442)),
    ("vgg16", 0.25, 16, TEN_GIGABIT, (0.984, 1.206, 0.961, 0.958, 0.958)),
    ("vgg16", 0.25, 256, TEN_GIGABIT, (1.497, 1.272, 1.099, 1.062, 1.040)),
    ("vgg16", 0.25, 1024, TEN_GIGABIT, (2.974, 1.321, 1.378, 1.321, 1.134)),
]


@pytest.mark.parametrize(("model", "backward", "workers", "link", "expected"), INDEPENDENT)
def test_steps_agree_with_an_independent_simulation(
    model: str,
    backward: float,
    workers: int,
    link: tuple[float, float],
    expected: tuple[float, ...],
) -> None:
    trace = scaled_to(load_trace(model), backward)
    inter = Link(latency_seconds=link[0], seconds_per_byte=link[1])
    costs = Costs(Cluster.regular(workers, 1), {}, Links(inter=inter))
    steps = [
        plan_step(planner, trace, costs, tolerance=0.0).predicted_step_seconds
        for planner in ("wfbp", "single", "ddp", "mgwfbp", "optimal")
    ]
    assert steps == pytest.approx(expected, rel=0.01)
