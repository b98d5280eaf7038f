"""Whoever reads or writes parameters finds them up to date; what cannot be deferred is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch

from pipelined import Trainee, pipelined_plan, sgd
from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.errors import PlanError, RankFailure, SlipstreamError
from slipstream.sync import GradientSync
from small_models import batch, loss_of, mlp, weights


def evaluate(trainee: Trainee) -> None:
    trainee.model.eval()(batch(0))


def without_gradient(trainee: Trainee) -> None:
    with torch.no_grad():
        trainee.model(batch(0))


READERS: dict[str, Callable[[Trainee], object]] = {
    "flush": lambda t: t.sync.flush(),
    "wait": lambda t: t.sync.wait(),
    "evaluation": evaluate,
    "no_grad": without_gradient,
    "state_dict": lambda t: t.model.state_dict(),
    "state_dict of a part": lambda t: t.model[3].state_dict(),  # type: ignore[index]
    "the optimizer's state_dict": lambda t: t.optimizer.state_dict(),
    "the optimizer's state": lambda t: t.optimizer.state,
    "a call of a part": lambda t: t.model[0](batch(0)),  # type: ignore[index]
    "sync_buffers": lambda t: t.sync.sync_buffers(),
    "close": lambda t: t.sync.close(),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_find_everything_up_to_date(reader: str) -> None:
    def body(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, int]:
        trainee, other = Trainee(rank, pipelined=True), mlp()
        optimizer = sgd(other)
        trainee.train(0, 1)
        before = weights(trainee.model)
        READERS[reader](trainee)
        READERS[reader](trainee) if reader != "close" else None
        after = weights(trainee.model)
        for step in range(2):
            optimizer.zero_grad()
            torch.stack([loss_of(other, batch(r, step)) for r in range(2)]).mean().backward()
            optimizer.step()
        torch.testing.assert_close(after, weights(other), rtol=1e-12, atol=1e-12)
        trainee.sync.close()
        return before, after, len(trainee.optimizer.state)

    for before, after, num_states in run_ranks(body, 2):
        assert not torch.equal(before, after)
        assert num_states == 6


def test_what_is_loaded_stays() -> None:
    def body(rank: Rank) -> None:
        trainee = Trainee(rank, pipelined=True)
        saved = copy.deepcopy((mlp(3).state_dict(), trainee.optimizer.state_dict()))
        trainee.train(0, 1)
        trainee.model.load_state_dict(saved[0])
        trainee.optimizer.load_state_dict(saved[1])
        trainee.sync.flush()
        assert torch.equal(weights(trainee.model), weights(mlp(3)))
        assert not trainee.optimizer.state
        trainee.end()

    run_ranks(body, 2)


def test_a_plan_that_gathers_needs_a_deferred_optimizer() -> None:
    model = mlp()
    sync = GradientSync(model, plan=pipelined_plan(model))
    with pytest.raises(PlanError, match=r"optimizer = sync\.deferred\(optimizer\)"):
        loss_of(model, batch(0)).backward()
    other = mlp()
    sync = GradientSync(other)
    with pytest.raises(PlanError, match="takes a deferred optimizer"):
        sync.use_plan(pipelined_plan(other))


def test_what_cannot_be_deferred_is_refused() -> None:
    model = mlp()
    sync = GradientSync(model, plan=pipelined_plan(model))
    with pytest.raises(SlipstreamError, match="LBFGS"):
        sync.deferred(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(SlipstreamError, match="LBFGS"):
        sync.deferred(torch.optim.LBFGS(model.parameters()), separable=True)
    plain = sgd(model)
    optimizer = sync.deferred(plain)
    with pytest.raises(SlipstreamError, match="deferred already"):
        sync.deferred(optimizer)
    with pytest.raises(SlipstreamError, match="one optimizer, once"):
        sync.deferred(sgd(model))
    with pytest.raises(SlipstreamError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(SlipstreamError, match="in its place"):
        plain.step()
    with pytest.raises(SlipstreamError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_the_model_can_be_copied_and_pickled_and_copies_are_on_their_own() -> None:
    model = mlp()
    optimizer = GradientSync(model, plan=pipelined_plan(model)).deferred(sgd(model))
    loss_of(model, batch(0)).backward()
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = weights(model)
        loss_of(other, batch(0)).backward()
        other.state_dict()
        assert torch.equal(weights(model), before), "the original's updates still wait"


def test_an_engine_that_is_closed_leaves_an_optimizer_that_steps_and_no_hooks() -> None:
    model, reference = mlp(), mlp()
    sync = GradientSync(model, plan=pipelined_plan(model))
    optimizer, plain = sync.deferred(sgd(model)), sgd(reference)
    loss_of(model, batch(0)).backward()
    sync.close()
    for each in (model, reference):
        if each is reference:
            loss_of(each, batch(0)).backward()
        (optimizer if each is model else plain).step()
    assert torch.equal(weights(model), weights(reference))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any(m._state_dict_pre_hooks for m in model.modules())


def test_an_engine_is_collected_with_its_model() -> None:
    model = mlp()
    sync = GradientSync(model, plan=pipelined_plan(model))
    optimizer = sync.deferred(sgd(model))
    loss_of(model, batch(0)).backward()
    gone = weakref.ref(sync), weakref.ref(model)
    del sync, model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.usefixtures("brief_reports")
@pytest.mark.parametrize("when", ["before the step", "before the forward"])
def test_a_rank_that_is_lost_is_named_by_whoever_waits_for_it(when: str) -> None:
    def body(rank: Rank) -> None:
        trainee = Trainee(rank, pipelined=True, store=rank.store, timeout_seconds=1.0)
        trainee.train(0)
        trainee.backward(1)
        if rank.rank == 1 and when == "before the step":
            rank.hold(8.0)
            raise SystemExit
        trainee.optimizer.step()
        if rank.rank == 1:
            trainee.sync.flush()
            rank.hold(8.0)
            raise SystemExit
        trainee.backward(2)
        trainee.sync.wait()

    zero, _ = run_ranks_settled(body, 2, timeout_seconds=1.0)
    assert isinstance(zero, RankFailure), zero
    assert "no answer from rank 1" in str(zero)
    assert ("gathering bucket" if "step" in when else "averaging bucket") in str(zero)


def test_an_unmodified_grad_scaler_skips_on_all_ranks_alike() -> None:
    def body(rank: Rank, pipelined: bool) -> tuple[torch.Tensor, list[float]]:
        trainee, scales = Trainee(rank, pipelined=pipelined), []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        for step in range(5):
            trainee.optimizer.zero_grad()
            loss = loss_of(trainee.model, batch(rank.rank, step))
            bad = step == 2 and rank.rank == 1
            scaler.scale(loss * (torch.inf if bad else 1.0)).backward()
            scaler.step(trainee.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return trainee.end(), scales

    plain = run_ranks(lambda rank: body(rank, False), 2)[0]
    for mine, scales in run_ranks(lambda rank: body(rank, True), 2):
        assert torch.equal(mine, plain[0]) or torch.allclose(mine, plain[0], rtol=1e-12)
        assert scales == plain[1] and scales[2] < scales[1]
