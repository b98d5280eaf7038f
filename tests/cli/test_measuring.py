"""`slipstream probe` and `slipstream profile`: what they write, refuse and print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.cli.main import app
from slipstream.costs import ClusterSpec, Link, Links, MeasuredCost
from slipstream.errors import CostError, RecipeError, SlipstreamError
from slipstream.trace import Trace, TraceGradient
from slipstream.train.launch.measure import PROBE, PROFILE, Measurement

TRACE = Trace(
    model="net",
    batch_size=32,
    input_seconds=0.001,
    forward_seconds=0.1,
    update_seconds=0.002,
    note="Median of 20 steps.",
    gradients=(
        TraceGradient(name="fc.weight", numel=2**20, ready_seconds=0.05, ready_spread_seconds=0.01),
        TraceGradient(name="conv.weight", numel=9, ready_seconds=0.2, ready_spread_seconds=0.02),
    ),
)
CLUSTER = ClusterSpec(
    backend="gloo",
    nodes=2,
    ranks_per_node=1,
    links=Links(inter=Link(latency_seconds=3e-5, seconds_per_byte=8e-9)),
    costs=(
        MeasuredCost(
            collective="native",
            points=((1024, 0.001), (2**20, 0.004), (2**21, 0.008)),
            spread_seconds=(0.0001, 0.0002, 0.0003),
        ),
    ),
)


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Lets measurements end at once, with a made-up result; what was asked for."""
    asked: list[Measurement] = []

    def measure_here(measurement: Measurement) -> str:
        measurement.check()
        asked.append(measurement)
        print("chatter of a library")
        return {PROFILE: TRACE, PROBE: CLUSTER}[measurement.task].to_json()

    monkeypatch.setattr("slipstream.train.launch.measure.measure_here", measure_here)
    return asked


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The command's standard output; it must succeed."""
    app(list(arguments), standalone_mode=False)
    return capfd.readouterr().out


def test_a_profile_is_told_in_a_few_lines(
    asked: list[Measurement], capfd: pytest.CaptureFixture[str]
) -> None:
    out = run(capfd, "profile", "digits", "--steps", "7", "--nodes", "2", "--per-node", "1")
    assert asked[0].wanted == {"steps": 7}
    assert asked[0].recipe.cluster.nodes == 2 and asked[0].recipe.cluster.ranks_per_node == 1
    assert "net, 32 samples a rank. Median of 20 steps." in out
    assert "backward       200 ms    20.0 ms" in out
    assert "2 gradients of 4.00 MiB; the first, fc.weight, is ready at 25.0 % of backward" in out
    assert "chatter" not in out
    assert Trace.load(Path("trace.json")) == TRACE


def test_a_probe_shows_table_fits_and_links(
    asked: list[Measurement], capfd: pytest.CaptureFixture[str]
) -> None:
    out = run(capfd, "probe", "--seconds", "3", "--output", "mine.json")
    assert asked[0].wanted == {
        "seconds": 3.0,
        "collectives": [],
        "wires": ["float32"],
        "sparse": [],
    }
    assert "  1.00 MiB    4.00 ms     200 µs" in out
    assert "floor: max(1 ms, 3.81 ns/B); off by 0%" in out
    assert "two regimes: " in out and "line: " in out
    assert "links between nodes: 30 µs, 1 Gbit/s" in out and "inside nodes" not in out
    assert ClusterSpec.load(Path("mine.json")) == CLUSTER


def test_a_probe_measures_the_collectives_and_wires_that_are_named(
    asked: list[Measurement], capfd: pytest.CaptureFixture[str]
) -> None:
    run(capfd, "probe", "--collective", "torus", "--collective", "ring", "--wire", "bfloat16")
    assert asked[0].wanted["collectives"] == ["torus", "ring"]
    assert asked[0].wanted["wires"] == ["bfloat16"]
    refused = CliRunner().invoke(app, ["probe", "--collective", "tours"])
    assert refused.exit_code == 2
    assert "there is no collective 'tours'" in refused.output


@pytest.mark.parametrize(("command", "document"), [("profile", TRACE), ("probe", CLUSTER)])
def test_json_is_the_document_alone(
    asked: list[Measurement],
    capfd: pytest.CaptureFixture[str],
    command: str,
    document: Trace | ClusterSpec,
) -> None:
    out = run(capfd, command, "--json")
    assert type(document).from_json(out) == document


@pytest.mark.parametrize("command", ["profile", "probe"])
def test_an_output_that_exists_is_refused_before_anything_is_measured(
    asked: list[Measurement], command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("thesis.tex").write_text("years of work")
    result = CliRunner().invoke(app, [command, "--output", "thesis.tex"])
    assert isinstance(result.exception, SlipstreamError)
    assert "thesis.tex exists and was not overwritten" in str(result.exception)
    assert (asked, Path("thesis.tex").read_text()) == ([], "years of work")
    run(capfd, command, "--output", "thesis.tex", "--overwrite")
    assert (
        json.loads(Path("thesis.tex").read_text())["note"]
        == (TRACE if command == "profile" else CLUSTER).note
    )


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("command", ["profile", "probe"])
def test_a_second_measurement_of_the_default_name_asks(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run(capfd, command)
    with pytest.raises(SlipstreamError, match=r"json exists .* replace it with --overwrite\."):
        run(capfd, command)
    run(capfd, command, "--overwrite")


def test_mistakes_in_a_recipe_are_told_before_any_rank_starts() -> None:
    with pytest.raises(RecipeError, match="fashion"):
        app(["profile", "fashoin"], standalone_mode=False)
    with pytest.raises(RecipeError, match="cannot be divided by 3 ranks"):
        app(["profile", "digits", "--per-node", "3"], standalone_mode=False)
    with pytest.raises(CostError, match="A single rank has no one to exchange gradients with"):
        app(["probe", "--per-node", "1"], standalone_mode=False)
    result = CliRunner().invoke(app, ["probe", "--seconds", "0"])
    assert result.exit_code == 2


def call(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(slipstream.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.processes
def test_ranks_of_their_own_profile_a_recipe(tmp_path: Path) -> None:
    result = call(tmp_path, "slipstream", "profile", "digits", "--steps", "3", "--json")
    assert result.returncode == 0, result.stderr
    trace = Trace.from_json(result.stdout)
    assert trace == Trace.load(tmp_path / "trace.json")
    assert (trace.model, trace.batch_size) == ("resnet_small", 32)
    assert trace.note.startswith("Median of 3 steps on the slowest of 2 ranks; CPU")
    assert len(trace.gradients) == 26
    needed = {gradient.name: gradient.needed_seconds for gradient in trace.gradients}
    assert needed["stem.weight"] is not None and needed["head.bias"] is not None
    assert needed["stem.weight"] < needed["head.bias"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.processes
def test_ranks_of_torchrun_probe_the_cluster_that_they_are(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = ["slipstream", "probe", "--seconds", "1", "--nodes", "2", "--json"]
    result = call(tmp_path, *torchrun, *command)
    assert result.returncode == 0, result.stderr
    spec = ClusterSpec.from_json(result.stdout)
    assert spec == ClusterSpec.load(tmp_path / "cluster.json")
    assert (spec.backend, spec.nodes, spec.ranks_per_node) == ("gloo", 2, 1)
    assert spec.links is not None and spec.links.intra is None and spec.links.inter is not None
