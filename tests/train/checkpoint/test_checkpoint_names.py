"""Case 38: state goes by parameter name; what does not fit is listed and refused as a whole."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from checkpointing import Two, assert_same_weights, save, train
from slipstream.errors import CheckpointError
from slipstream.train.checkpoint import apply


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.1, momentum=0.9)


def trained() -> tuple[Two, Optimizer]:
    torch.manual_seed(0)
    model = Two()
    optimizer = momentum(model)
    train(model, optimizer, range(3))
    return model, optimizer


def test_swapped_declaration_order_gets_its_own_state(tmp_path: Path) -> None:
    model, optimizer = trained()
    loaded = save(tmp_path, model, optimizer)
    swapped = Two(swapped=True)
    again = momentum(swapped)
    assert [n for n, _ in swapped.named_parameters()] != [n for n, _ in model.named_parameters()]
    apply(loaded, swapped, again)
    for name, parameter in swapped.named_parameters():
        before = optimizer.state[model.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(again.state[parameter]["momentum_buffer"], before), name
    train(model, optimizer, range(3, 8))
    train(swapped, again, range(3, 8))
    in_order = Two()
    in_order.load_state_dict(swapped.state_dict())
    assert_same_weights(model, in_order)


def test_a_new_layer_is_refused_unless_allowed(tmp_path: Path) -> None:
    model, optimizer = trained()
    loaded = save(tmp_path, model, optimizer)
    larger = Two(third=True)
    again = momentum(larger)
    untouched = copy.deepcopy(larger)
    with pytest.raises(CheckpointError, match=r"third\.weight is missing .*third\.bias is missing"):
        apply(loaded, larger, again)
    assert_same_weights(larger, untouched)
    assert not again.state
    apply(loaded, larger, again, allow_missing=["third.*"])
    assert torch.equal(larger.third.weight, untouched.third.weight)
    assert torch.equal(larger.get_parameter("first.weight"), model.get_parameter("first.weight"))
    assert larger.third.weight not in again.state
    assert len(again.state) == 6


def test_a_layer_that_is_gone_is_refused_unless_allowed(tmp_path: Path) -> None:
    larger = Two(third=True)
    optimizer = momentum(larger)
    train(larger, optimizer, range(1))
    loaded = save(tmp_path, larger, optimizer)
    smaller = Two()
    again = momentum(smaller)
    with pytest.raises(CheckpointError, match=r"third\.weight is unknown to the model"):
        apply(loaded, smaller, again)
    apply(loaded, smaller, again, allow_unknown=["third.*"])
    assert len(again.state) == 6


def test_another_model_is_named_with_the_first_differences(tmp_path: Path) -> None:
    loaded = save(tmp_path, *trained())
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(CheckpointError) as refused:
        apply(loaded, other)
    text = str(refused.value)
    assert "Two saved, Sequential here" in text
    assert "0.weight is missing in the checkpoint" in text
    assert "and 8 more" in text
    wider = Two()
    wider.first = nn.Linear(4, 5)
    with pytest.raises(CheckpointError, match=r"float32 \[4, 4\] in the .* float32 \[5, 4\] in"):
        apply(loaded, wider)
    with pytest.raises(CheckpointError, match=r"float32 \[4, 4\] in the .* float64 \[4, 4\] in"):
        apply(loaded, Two().double())


def test_another_optimizer_changes_nothing(tmp_path: Path) -> None:
    loaded = save(tmp_path, *trained())
    model = Two()
    untouched = copy.deepcopy(model)
    with pytest.raises(CheckpointError, match="its state is of SGD, the optimizer is Adam"):
        apply(loaded, model, Adam(model.parameters()))
    assert_same_weights(model, untouched)


def groups_of(model: Two, swapped: bool) -> Optimizer:
    groups = [
        {"params": [model.get_parameter("first.weight")], "lr": 0.5},
        {"params": [p for n, p in model.named_parameters() if n != "first.weight"], "lr": 0.01},
    ]
    return SGD(groups[::-1] if swapped else groups, momentum=0.9)


def test_group_options_follow_their_parameters(tmp_path: Path) -> None:
    model = Two()
    optimizer = groups_of(model, swapped=False)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.param_groups[1]["initial_lr"] = 0.125
    loaded = save(tmp_path, model, optimizer)
    other = Two()
    again = groups_of(other, swapped=True)
    apply(loaded, other, again)
    assert [group["lr"] for group in again.param_groups] == [0.01, 0.25]
    assert again.param_groups[0]["initial_lr"] == 0.125
    with pytest.raises(CheckpointError, match=r"group 0 joins .* saved with different options"):
        apply(loaded, other, momentum(other))


def test_a_parameter_frozen_since_is_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    loaded = save(tmp_path, model, optimizer)
    part = SGD([p for n, p in model.named_parameters() if n != "scale"], 0.1, momentum=0.9)
    with pytest.raises(CheckpointError, match=r"scale is unknown to the optimizer.*allow_unknown"):
        apply(loaded, model, part)
    with pytest.raises(CheckpointError, match=r"Nothing was changed; take another\."):
        apply(loaded, model, part, way_out="take another")
    apply(loaded, model, part, allow_unknown=["scale"])
    assert len(part.state) == 5


def test_state_of_steps_since_is_removed(tmp_path: Path) -> None:
    model = Two()
    optimizer = momentum(model)
    loaded = save(tmp_path, model, optimizer)
    train(model, optimizer, range(2))
    assert optimizer.state
    apply(loaded, model, optimizer)
    assert not optimizer.state


def test_applied_state_is_independent_of_the_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    loaded = save(tmp_path, model, optimizer)
    results = []
    for _ in range(2):
        other = Two()
        again = momentum(other)
        apply(loaded, other, again)
        train(other, again, range(3, 5))
        results.append(other)
    assert_same_weights(*results)


def test_another_layout_is_refused_with_both_numbers(tmp_path: Path) -> None:
    loaded = save(tmp_path, *trained())
    loaded.require_layout(world_size=2, global_batch_size=8)
    with pytest.raises(CheckpointError, match=r"saved with 2 ranks and this job has 3"):
        loaded.require_layout(world_size=3, global_batch_size=8)
    with pytest.raises(CheckpointError, match=r"saved with 8 samples a batch and this job has 16"):
        loaded.require_layout(world_size=2, global_batch_size=16)
