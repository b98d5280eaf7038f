"""Case 38: state goes by parameter name; what does not fit is listed and refused as a whole."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from checkpointing import POSITION, Two, assert_same_weights, save, train
from slipstream.errors import CheckpointError
from slipstream.train.checkpoint import CheckpointWriter, TrainState, apply, load


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


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"world_size": 3}, r"saved with 2 ranks and this job has 3: .* Resume with 2,"),
        ({"global_batch_size": 16}, r"saved with 8 samples a batch .* has 16: .* Resume with 8,"),
        ({"seed": 8}, r"saved with train\.seed=7 and this job has 8: .* Resume with 7,"),
        ({"dataset": "fashion"}, r"with data\.dataset=digits and .* has fashion: .* with digits,"),
        ({"num_samples": 31}, r"saved with 32 training samples and .* 31: .* Resume with 32,"),
    ],
)
def test_another_layout_is_refused_with_both_values(
    tmp_path: Path, other: dict[str, object], words: str
) -> None:
    position = POSITION.model_copy(update={"dataset": "digits", "num_samples": 32})
    loaded = save(tmp_path, *trained(), position=position)
    layout: dict[str, Any] = {
        name: getattr(position, name)
        for name in ("world_size", "global_batch_size", "seed", "dataset", "num_samples")
    }
    loaded.require_layout(**layout)
    with pytest.raises(CheckpointError, match=words):
        loaded.require_layout(**layout | other)


def test_what_a_checkpoint_does_not_say_about_its_data_is_not_compared(tmp_path: Path) -> None:
    loaded = save(tmp_path, *trained())
    loaded.require_layout(
        world_size=2, global_batch_size=8, seed=7, dataset="digits", num_samples=9
    )


@pytest.mark.parametrize(("steps_per_epoch", "fits"), [(4, True), (3, False), (5, False)])
def test_a_step_and_a_position_that_contradict_each_other_are_refused(
    tmp_path: Path, steps_per_epoch: int, fits: bool
) -> None:
    position = POSITION.model_copy(update={"epoch": 0, "step_in_epoch": 3})
    with CheckpointWriter(tmp_path) as writer:
        model, optimizer = trained()
        early = TrainState(model=model, optimizer=optimizer, position=position)
        late = replace(early, position=position.model_copy(update={"epoch": 1}))
        paths = [
            writer.save(state, step, block=True).path for state, step in ((early, 3), (late, 7))
        ]
    first, second = (load(path) for path in paths if path is not None)
    first.require_steps_per_epoch(steps_per_epoch)
    if fits:
        second.require_steps_per_epoch(steps_per_epoch)
        return
    with pytest.raises(CheckpointError, match=rf"step 7, and .* {steps_per_epoch} steps an epoch"):
        second.require_steps_per_epoch(steps_per_epoch)
