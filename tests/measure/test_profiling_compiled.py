"""Compiled models: nothing is traced or compiled again, and the trace says what it means."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from slipstream.measure import Profiler, profile
from slipstream.measure.clocks import HostClock
from slipstream.measure.merging import lateness
from slipstream.trace import Trace, TraceGradient
from small_models import batch, loss_of, mlp
from worked_models import StoodClock

_NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def steps_of(model: nn.Module) -> Trace:
    """Every mark comes a second after the one before."""
    clock = StoodClock()

    def now() -> float:
        clock.wait(1.0)
        return clock.now

    return profile(model, lambda: loss_of(model, batch(0)).backward(), clock=HostClock(now))


def test_a_wrapped_model_is_watched_from_outside_alone() -> None:
    model = torch.compile(mlp(), backend="aot_eager")
    assert isinstance(model, nn.Module)
    trace = steps_of(model)
    assert trace.model == "Sequential"
    assert [gradient.needed_seconds for gradient in trace.gradients] == [0.0] * 6
    assert {gradient.name for gradient in trace.gradients} == {f"_orig_mod.{n}" for n in _NAMES}
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_model_that_compiled_itself_is_watched_around_its_call() -> None:
    model = mlp()
    model.compile(backend="aot_eager")
    call = model._compiled_call_impl
    trace = steps_of(model)
    assert (trace.batch_size, trace.input_seconds, trace.forward_seconds) == (4, 1.0, 1.0)
    assert [gradient.needed_seconds for gradient in trace.gradients] == [0.0] * 6
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert model._compiled_call_impl is call
    assert not model._forward_pre_hooks and not model[0]._forward_pre_hooks


def test_of_blocks_that_are_compiled_each_is_one_moment() -> None:
    model = mlp()
    block = nn.Sequential(model[0], model[1], model[2])
    whole = nn.Sequential(block, model[3])
    block.compile(backend="aot_eager")
    with Profiler(whole) as profiler:
        assert profiler.parameters[0][0] == "1.bias"
    trace = steps_of(whole)
    moments = {gradient.name: gradient.needed_seconds for gradient in trace.gradients}
    assert moments["0.0.weight"] == moments["0.2.bias"] == 1.0  # one mark after the model's own
    assert moments["1.weight"] == 2.0
    assert trace.gradients[0].name.startswith("1.")
    assert not counters["graph_break"]


def trace_with_ready(*seconds: float) -> Trace:
    gradients = tuple(
        TraceGradient(name=str(index), numel=1, ready_seconds=ready)
        for index, ready in enumerate(seconds)
    )
    return Trace(
        model="m",
        batch_size=1,
        input_seconds=0.0,
        forward_seconds=1.0,
        update_seconds=0.0,
        gradients=gradients,
    )


def test_gradients_that_all_come_at_the_end_are_told() -> None:
    late = trace_with_ready(0.98, 0.99, 1.0)
    whole = lateness(late, compiled_whole=True)
    assert "ready at 98 % of backward (the model was compiled whole)" in whole
    assert "block by block" in whole
    assert "as in a model compiled whole" in lateness(late, compiled_whole=False)
    assert lateness(trace_with_ready(0.2, 1.0), compiled_whole=True) == ""
    assert lateness(trace_with_ready(1.0), compiled_whole=False) == ""
