"""Traces of steps: what is recorded, and that recording changes nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.comm.peers import Peers
from slipstream.errors import RankFailure, RanksDiffer, TraceError, UnsupportedModel
from slipstream.measure import Profiler, profile
from slipstream.measure.clocks import DeviceClock, HostClock
from slipstream.sync import GradientSync
from slipstream.trace import Trace
from small_models import batch, loss_of, mlp, weights
from worked_models import StoodClock, Worker, work, workers

ALONE = Peers(None, None, 1.0, torch.device("cpu"))


def needed(trace: Trace) -> dict[str, float | None]:
    return {gradient.name: gradient.needed_seconds for gradient in trace.gradients}


def ready(trace: Trace) -> dict[str, float]:
    return {gradient.name: gradient.ready_seconds for gradient in trace.gradients}


def worked_step(model: nn.Module, clock: StoodClock) -> Callable[[], None]:
    """Input 5 s, the model, a loss of 0.5 s each way, an update of 7 s."""
    x = torch.ones(4, 3)

    def step() -> None:
        clock.wait(5.0)
        work(model(x), clock, 0.5, 0.5).sum().backward()
        clock.wait(7.0)

    return step


def test_a_trace_says_when_everything_happens_in_a_step() -> None:
    clock = StoodClock()
    model = workers(clock)
    trace = profile(model, worked_step(model, clock), clock=HostClock(clock), name="three")
    assert (trace.model, trace.batch_size) == ("three", 4)
    assert (trace.input_seconds, trace.forward_seconds, trace.update_seconds) == (5.0, 7.0, 7.0)
    assert ready(trace) == {"2.weight": 30.0, "1.weight": 50.0, "0.weight": 60.0}
    assert needed(trace) == {"0.weight": 0.0, "1.weight": 1.0, "2.weight": 3.0}
    assert [gradient.ready_spread_seconds for gradient in trace.gradients] == [0.0, 0.0, 0.0]
    assert "Median of 8 steps" in trace.note
    assert Trace.from_json(trace.to_json()) == trace


def test_the_median_counts_and_the_spread_is_told() -> None:
    clock = StoodClock()
    model = workers(clock)
    delays: Iterator[float] = iter([100.0, 100.0, 0.0, 1.0, 2.0, 3.0, 4.0])
    step = worked_step(model, clock)

    def uneven() -> None:
        clock.wait(next(delays))
        step()

    trace = profile(model, uneven, steps=5, clock=HostClock(clock))
    assert (trace.input_seconds, trace.input_spread_seconds) == (7.0, 2.0)


def test_what_never_fires_is_ready_at_the_end_of_backward() -> None:
    clock = StoodClock()
    body = workers(clock)
    model = nn.ModuleDict({"body": body, "spare": Worker(clock, 0.0, 0.0)})
    trace = profile(model, worked_step(body, clock), clock=HostClock(clock), batch_size=4)
    assert ready(trace)["spare.weight"] == trace.backward_seconds
    assert needed(trace)["spare.weight"] == 0.0


def test_accumulation_counts_all_but_the_last_backward_as_forward() -> None:
    clock = StoodClock()
    model = workers(clock)
    x = torch.ones(4, 3)

    def step() -> None:
        for _ in range(2):
            work(model(x), clock, 0.5, 0.5).sum().backward()
        clock.wait(7.0)

    trace = profile(model, step, clock=HostClock(clock))
    assert trace.forward_seconds == 7.0 + 60.0 + 7.0
    assert (trace.backward_seconds, trace.update_seconds) == (60.0, 7.0)
    assert (trace.batch_size, needed(trace)["2.weight"]) == (8, 3.0)


def test_frozen_parameters_have_no_gradient_and_shared_ones_one() -> None:
    clock = StoodClock()
    model = workers(clock)
    model[0].weight.requires_grad_(False)
    model[2].weight = model[1].weight
    trace = profile(model, worked_step(model, clock), clock=HostClock(clock))
    assert ready(trace) == {"1.weight": 50.0}
    assert needed(trace) == {"1.weight": 1.0}


class Reader(nn.Module):
    """Reads the last layer's weight before the first layer is called."""

    def __init__(self, clock: StoodClock) -> None:
        super().__init__()
        self.clock = clock
        self.first = Worker(clock, 1.0, 1.0)
        self.middle = Worker(clock, 1.0, 1.0)
        self.last = Worker(clock, 1.0, 1.0)
        self.never_called = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.last.weight
        x = self.middle(self.first(x))
        x = F.linear(x, self.never_called.weight)
        y: torch.Tensor = self.last(x)
        return y


def test_a_parameter_is_needed_where_it_is_read_not_where_its_module_is_called() -> None:
    clock = StoodClock()
    model = Reader(clock)
    trace = profile(model, worked_step(model, clock), clock=HostClock(clock))
    assert needed(trace) == {
        "last.weight": 0.0,
        "first.weight": 0.0,
        "middle.weight": 1.0,
        "never_called.weight": 1.0,  # read after middle was called: the last moment anyone knows
        "never_called.bias": 0.0,  # never read: nobody knows
    }


def test_the_projection_inside_multi_head_attention_is_needed_when_that_is_called() -> None:
    clock = StoodClock()

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = Worker(clock, 1.0, 1.0)
            self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.before(x)[:, None]
            y: torch.Tensor = self.attention(x, x, x, need_weights=False)[0][:, 0]
            return y

    model = Attention()
    trace = profile(model, worked_step(model, clock), clock=HostClock(clock))
    assert needed(trace)["attention.out_proj.weight"] == 1.0
    assert needed(trace)["attention.in_proj_weight"] == 1.0


@pytest.mark.parametrize(("reentrant", "repeated"), [(False, 0.0), (True, 2.0)])
def test_a_forward_that_is_repeated_in_backward_is_part_of_backward(
    reentrant: bool, repeated: float
) -> None:
    clock = StoodClock()

    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self[0](x)
            y: torch.Tensor = checkpoint(self[1], x, use_reentrant=reentrant)
            z: torch.Tensor = self[2](y)
            return z

    model = Checkpointed(*workers(clock))
    trace = profile(model, worked_step(model, clock), clock=HostClock(clock))
    assert trace.forward_seconds == 7.0
    # without reentrancy the repetition stops before the work, which backward does not need
    assert list(ready(trace).values()) == [30.0, 50.0 + repeated, 60.0 + repeated]
    assert needed(trace) == {"0.weight": 0.0, "1.weight": 1.0, "2.weight": 3.0}


def test_a_model_whose_parts_are_called_without_it_is_recorded_all_the_same() -> None:
    clock = StoodClock()
    model = workers(clock)

    def step() -> None:
        clock.wait(5.0)
        model[2](model[1](model[0](torch.ones(4, 3)))).sum().backward()
        clock.wait(7.0)

    trace = profile(model, step, clock=HostClock(clock), batch_size=4)
    assert (trace.input_seconds, trace.update_seconds) == (5.0, 7.0)
    assert trace.forward_seconds + trace.backward_seconds == 6.0 + 60.0
    assert ready(trace) == {"2.weight": 0.0, "1.weight": 20.0, "0.weight": 30.0}


def trained(optimizer_steps: int, *, profiled: bool, clock: StoodClock) -> tuple[nn.Module, Any]:
    """A loop as anyone writes it: input, step, sometimes an evaluation; followed from outside."""
    model = nn.Sequential(*workers(clock), nn.Dropout(0.5))
    halves = [torch.optim.Adam(model[:2].parameters()), torch.optim.SGD(model[2].parameters(), 0.1)]
    torch.manual_seed(3)
    profiler = Profiler(model, steps=4, clock=HostClock(clock)) if profiled else None
    for number in range(optimizer_steps):
        clock.wait(5.0)
        for optimizer in halves:
            optimizer.zero_grad()
        work(model(torch.randn(4, 3)), clock, 0.5, 0.5).square().sum().backward()
        for optimizer in halves:
            clock.wait(3.0)
            optimizer.step()
        if number == 4:
            with torch.no_grad():
                model(torch.randn(4, 3))
    return model, profiler


def test_a_running_loop_is_followed_and_not_changed_by_a_bit() -> None:
    clock = StoodClock()
    plain, _ = trained(10, profiled=False, clock=clock)
    watched, profiler = trained(10, profiled=True, clock=clock)
    assert torch.equal(weights(plain), weights(watched))
    assert profiler.done
    profiler.close()
    trace = profiler.trace(ALONE)
    assert (trace.input_seconds, trace.forward_seconds, trace.update_seconds) == (5.0, 7.0, 6.0)
    assert trace.backward_seconds == 60.0
    hooks = [module._forward_pre_hooks or module._forward_hooks for module in watched.modules()]
    assert not any(hooks)
    assert all(not p._post_accumulate_grad_hooks for p in watched.parameters())


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_a_copy_made_while_recording_is_a_model_of_its_own(how: str) -> None:
    clock = StoodClock()
    model = workers(clock)
    step = worked_step(model, clock)
    with Profiler(model, steps=3, clock=HostClock(clock)) as profiler:
        twin = copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model))
        for _ in range(5):
            profiler.begin_step()
            step()
            clock.wait(100.0)
            twin(torch.ones(1, 3)).sum().backward()
            profiler.end_step()
    assert torch.equal(weights(twin), weights(model))
    trace = profiler.trace(ALONE)
    assert (trace.batch_size, trace.update_seconds) == (4, 107.0)


def test_waiting_for_averages_is_no_part_of_the_update() -> None:
    clock = StoodClock()
    model = workers(clock)
    trace = profile(model, worked_step(model, clock), clock=HostClock(clock), waited=lambda: 2.5)
    assert trace.update_seconds == 4.5


def test_recording_beside_the_engine_leaves_every_bit_as_it_is() -> None:
    def train(rank: Rank, recorded: bool) -> tuple[torch.Tensor, Trace | None]:
        model = mlp()
        sync = GradientSync(model, group=rank.new_group(), plan="wfbp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        profiler = None
        if recorded:
            profiler = Profiler(model, steps=3, waited=lambda: sync.timeline.exposed_seconds)
        for number in range(8):
            optimizer.zero_grad()
            loss_of(model, batch(rank.rank, number)).backward()
            optimizer.step()
        trace = None
        if profiler is not None:
            trace = profiler.trace(Peers(rank.group, None, 5.0, torch.device("cpu")))
            profiler.close()
        sync.close()
        return weights(model), trace

    plain = run_ranks(lambda rank: train(rank, False), 2)
    recorded = run_ranks(lambda rank: train(rank, True), 2)
    for (bits, _), (same_bits, trace) in zip(plain, recorded, strict=True):
        assert torch.equal(bits, same_bits)
        assert trace is not None and len(trace.gradients) == 6
    assert recorded[0][1] == recorded[1][1]


def test_over_ranks_the_slowest_counts_gradient_by_gradient() -> None:
    def body(rank: Rank) -> Trace:
        clock = StoodClock()
        model = workers(clock)
        layer = model[rank.rank]
        assert isinstance(layer, Worker)
        layer.back += 4.0
        return profile(model, worked_step(model, clock), clock=HostClock(clock), group=rank.group)

    zero, one = run_ranks(body, 2)
    assert zero == one
    assert ready(zero) == {"2.weight": 30.0, "1.weight": 54.0, "0.weight": 64.0}


def test_ranks_that_profile_different_models_all_say_so() -> None:
    def body(rank: Rank) -> None:
        clock = StoodClock()
        model = workers(clock)
        if rank.rank == 1:
            model[1].weight = nn.Parameter(torch.ones(1))
        profile(model, worked_step(model, clock), group=rank.group)

    for outcome in run_ranks_settled(body, 3):
        assert isinstance(outcome, RanksDiffer)
        assert "'1.weight' (3 x float32) where rank 1 has '1.weight' (1 x float32)" in str(outcome)


def test_ranks_that_profile_another_number_of_steps_all_say_so() -> None:
    def body(rank: Rank) -> None:
        clock = StoodClock()
        model = workers(clock)
        profile(model, worked_step(model, clock), steps=3 + rank.rank, group=rank.group)

    for outcome in run_ranks_settled(body, 2):
        assert isinstance(outcome, RanksDiffer)
        assert "rank 0 profiles 3 steps after 2 and rank 1 4 steps after 2" in str(outcome)


def test_a_rank_whose_step_fails_tells_the_others() -> None:
    def body(rank: Rank) -> None:
        model = mlp()

        def step() -> None:
            if rank.rank == 1:
                raise ValueError("no more samples")
            loss_of(model, batch(rank.rank)).backward()

        profile(model, step, group=rank.group)
        rank.hold(5.0)

    zero, one = run_ranks_settled(body, 2, timeout_seconds=2.0)
    assert isinstance(one, ValueError)
    assert isinstance(zero, RankFailure) and "rank 1: no more samples" in str(zero)


def test_a_step_without_a_backward_is_an_error_on_every_rank() -> None:
    def body(rank: Rank) -> None:
        model = mlp()

        def step() -> None:
            loss = loss_of(model, batch(rank.rank))
            if rank.rank == 0:
                loss.backward()

        profile(model, step, group=rank.group)

    for outcome in run_ranks_settled(body, 2):
        assert isinstance(outcome, TraceError)
        assert str(outcome).startswith("Rank 1 has seen no whole training step after 2")


def test_what_cannot_be_profiled_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no trainable parameter"):
        profile(nn.ReLU(), lambda: None)
    with pytest.raises(UnsupportedModel, match="lazy module"):
        profile(nn.LazyLinear(3), lambda: None)
    with pytest.raises(ValueError, match="at least one step"):
        profile(mlp(), lambda: None, steps=0)


class NotedEvent:
    """An event of a made-up device on which every mark comes 3 ms after the one before."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.milliseconds: float | None = None
        self.waited_for = False

    def record(self) -> None:
        NotedEvent.count += 1
        self.milliseconds = 3.0 * NotedEvent.count

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, end: NotedEvent) -> float:
        assert end.waited_for and end.milliseconds is not None and self.milliseconds is not None
        return end.milliseconds - self.milliseconds


def test_on_a_device_moments_are_events_that_nobody_waits_for_while_steps_run() -> None:
    class Device:
        Event = NotedEvent

    clock = DeviceClock(Device)
    marks = [clock.mark() for _ in range(3)]
    assert not any(mark.waited_for for mark in marks)
    assert clock.seconds(marks[0], marks[2]) == pytest.approx(0.006)
    model = mlp()
    trace = profile(model, lambda: loss_of(model, batch(0)).backward(), clock=clock)
    times = [gradient.ready_seconds for gradient in trace.gradients]
    assert times == pytest.approx([0.003 * number for number in range(1, 7)])
