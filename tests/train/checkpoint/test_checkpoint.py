"""A resumed run equals the uninterrupted one bit for bit, whatever the optimizer and the model."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from checkpointing import POSITION, Two, assert_same_weights, save, train
from slipstream.errors import CheckpointError
from slipstream.train.checkpoint import (
    apply,
    capture_random_streams,
    export_weights,
    find_checkpoint,
    load,
    restore_random_streams,
)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.99), amsgrad=True),
    "adamw-tensor-rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resumed_equals_uninterrupted(kind: str, tmp_path: Path) -> None:
    # The model has a scalar and a (0, 8) parameter: case 14's round trip is in every case here.
    torch.manual_seed(0)
    whole = Two()
    optimizer = OPTIMIZERS[kind](whole.parameters())
    train(whole, optimizer, range(3))
    loaded = save(tmp_path, whole, optimizer)
    assert loaded.model["nothing"].shape == (0, 8)
    assert loaded.model["scale"].shape == ()
    train(whole, optimizer, range(3, 8))
    resumed = Two()
    again = OPTIMIZERS[kind](resumed.parameters())
    apply(loaded, resumed, again)
    train(resumed, again, range(3, 8))
    assert_same_weights(whole, resumed)
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_a_model_of_only_empty_and_scalar_parameters(tmp_path: Path) -> None:
    model = nn.ParameterDict({"none": torch.empty(0, 8), "one": torch.tensor(2.0)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model["one"].square().backward()
    model["none"].grad = torch.empty(0, 8)
    optimizer.step()
    loaded = save(tmp_path, model, optimizer)
    other = nn.ParameterDict({"none": torch.empty(0, 8), "one": torch.tensor(0.0)})
    again = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    apply(loaded, other, again)
    assert_same_weights(model, other)
    assert again.state[other["none"]]["momentum_buffer"].shape == (0, 8)
    assert again.state[other["one"]]["momentum_buffer"].item() == 4.0


def test_momentum_that_does_not_exist_yet_stays_absent(tmp_path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    optimizer.state[model.scale] = {"momentum_buffer": None}
    loaded = save(tmp_path, model, optimizer)
    again = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    train(model, again, range(1))
    apply(loaded, model, again)
    assert dict(again.state) == {model.scale: {"momentum_buffer": None}}


class Masters(torch.optim.SGD):
    """SGD on 32-bit masters of 16-bit weights, as mixed-precision optimizers keep them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state[p].setdefault("master", p.detach().float())
                    master.sub_(group["lr"] * p.grad.float())
                    p.copy_(master)


def test_mixed_precision_masters_keep_their_dtype(tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(4, 4).bfloat16()
        return model, Masters(model.parameters(), 1e-3)

    def steps(model: nn.Module, optimizer: Optimizer, numbers: range) -> None:
        for number in numbers:
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).bfloat16()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    whole, optimizer = fresh()
    steps(whole, optimizer, range(3))
    loaded = save(tmp_path, whole, optimizer)
    steps(whole, optimizer, range(3, 8))
    resumed, again = fresh()
    apply(loaded, resumed, again)
    assert {s["master"].dtype for s in again.state.values()} == {torch.float32}
    steps(resumed, again, range(3, 8))
    assert_same_weights(whole, resumed)


def test_mixed_precision_scaler_is_restored_bit_for_bit(tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Module, Optimizer, GradScaler]:
        model = nn.Linear(4, 4)
        scaler = GradScaler("cpu", init_scale=2.0**15 / 3, growth_interval=4)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), scaler

    def steps(model: nn.Module, optimizer: Optimizer, scaler: GradScaler, numbers: range) -> None:
        for number in numbers:
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            if number == 1:
                batch[0, 0] = float("inf")  # skipped: the scale halves, the growth counter resets
            optimizer.zero_grad()
            scaler.scale(model(batch).mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    whole, optimizer, scaler = fresh()
    steps(whole, optimizer, scaler, range(4))
    saved = scaler.state_dict()
    assert saved["_growth_tracker"] == 2
    loaded = save(tmp_path, whole, optimizer, counters={"scaler": saved})
    steps(whole, optimizer, scaler, range(4, 9))
    resumed, again, scaler_again = fresh()
    apply(loaded, resumed, again)
    assert loaded.counters["scaler"] == saved
    scaler_again.load_state_dict(loaded.counters["scaler"])
    steps(resumed, again, scaler_again, range(4, 9))
    assert_same_weights(whole, resumed)
    assert scaler_again.state_dict() == scaler.state_dict()


def test_channels_last_state_keeps_its_layout(tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Conv2d, Optimizer]:
        model = nn.Conv2d(3, 8, 3)
        model.to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    model, optimizer = fresh()
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    strides = optimizer.state[model.weight]["momentum_buffer"].stride()
    loaded = save(tmp_path, model, optimizer)
    other, again = fresh()
    apply(loaded, other, again)
    restored = again.state[other.weight]["momentum_buffer"]
    assert restored.stride() == strides == other.weight.stride()
    assert torch.equal(restored, optimizer.state[model.weight]["momentum_buffer"])
    assert_same_weights(model, other)


def test_position_counters_tensors_plan_and_recipe_come_back(tmp_path: Path) -> None:
    model = Two()
    counters = {"best": 0.1 + 0.2, "worst": float("inf"), "milestones": {3: 1}, "pair": (1, [2])}
    tensors = {f"rank{r}/noise": torch.randn(3) for r in range(2)}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loaded = save(
        tmp_path, model, optimizer, counters=counters, tensors=tensors, plan="{}", recipe="a = 1\n"
    )
    assert (loaded.step, loaded.position, loaded.metric) == (3, POSITION, None)
    assert loaded.counters == counters
    assert (loaded.plan, loaded.recipe) == ("{}", "a = 1\n")
    torch.testing.assert_close(dict(loaded.tensors), tensors, rtol=0, atol=0)


def test_random_streams_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[list[float], float, float, float]:
        normal = float(numpy.random.normal())
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), normal

    draw()
    model = Two()
    streams = {f"rank0/{k}": v for k, v in capture_random_streams().items()}
    loaded = save(tmp_path, model, torch.optim.SGD(model.parameters(), 0.1), tensors=dict(streams))
    expected = draw(), draw()
    restore_random_streams({k.removeprefix("rank0/"): v for k, v in loaded.tensors.items()})
    assert (draw(), draw()) == expected
    with pytest.raises(CheckpointError, match="random streams"):
        restore_random_streams({})


class Tied(nn.Module):
    """One matrix under two names, and state of its own that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight


def test_tied_weights_are_stored_once_and_exported_under_each_name(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.decoder(model.encoder(torch.ones(1, 4))).sum().backward()
    optimizer.step()
    loaded = save(tmp_path / "run" / "checkpoints", model, optimizer)
    assert load_file(loaded.path / "model.safetensors").keys() == {"encoder.weight"}
    other = Tied()
    again = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    apply(loaded, other, again)
    assert other.decoder.weight is other.encoder.weight
    assert_same_weights(model, other)
    output = export_weights(tmp_path / "run", tmp_path / "weights.safetensors")
    plain = Tied()
    plain.load_state_dict(load_file(output))
    assert_same_weights(model, plain)
    untied = nn.ModuleDict({n: nn.Linear(4, 4, bias=False) for n in ("encoder", "decoder")})
    with pytest.raises(CheckpointError, match=r"decoder.weight has no optimizer state"):
        apply(loaded, untied, torch.optim.SGD(untied.parameters(), 0.1))
    apply(loaded, untied)
    assert_same_weights(model, untied)
    split = save(tmp_path / "split", untied, torch.optim.SGD(untied.parameters(), 0.1))
    with pytest.raises(CheckpointError, match=r"encoder.weight and decoder.weight are tied"):
        apply(split, other)


def test_export_overwrites_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    model = Two()
    loaded = save(tmp_path / "c", model, torch.optim.SGD(model.parameters(), 0.1))
    output = tmp_path / "weights.safetensors"
    output.write_text("mine")
    with pytest.raises(CheckpointError, match="exists and was not overwritten"):
        export_weights(loaded.path, output)
    assert output.read_text() == "mine"
    export_weights(loaded.path, output, overwrite=True)
    assert load_file(output).keys() == model.state_dict().keys()
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_weights(loaded.path, tmp_path / "absent" / "weights.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "weights.safetensors"]
    with pytest.raises(CheckpointError, match="does not exist"):
        export_weights(tmp_path / "no-run", tmp_path / "w")


class WithExtra(nn.Module):
    """A module with state that only it understands."""

    def __init__(self, told: object) -> None:
        super().__init__()
        self.told = told

    def get_extra_state(self) -> object:
        return self.told

    def set_extra_state(self, state: object) -> None:
        self.told = state


@pytest.mark.parametrize("told", [{"a": [1, (2.5, None)]}, {"t": torch.arange(3)}])
def test_extra_state_of_modules(told: object, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), WithExtra(told))
    loaded = save(tmp_path, model, torch.optim.SGD(model.parameters(), 0.1))
    inner = WithExtra({})
    apply(loaded, nn.Sequential(nn.Linear(2, 2), inner))
    torch.testing.assert_close(inner.told, told, rtol=0, atol=0)


def test_state_that_would_need_pickle_is_refused_by_name(tmp_path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CheckpointError, match=r"counters/loop/1 is a pathlib"):
        save(tmp_path, model, optimizer, counters={"loop": [1, Path("x")]})
    complicated = {"z": torch.zeros(1, dtype=torch.complex128)}
    with pytest.raises(CheckpointError, match=r"z in state.safetensors has dtype complex128"):
        save(tmp_path, model, optimizer, tensors=complicated)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1)
    with pytest.raises(CheckpointError, match=r"group 0 .* shape \(3,\) that the model does not"):
        save(tmp_path, model, stranger)


def test_a_compiled_model_shares_checkpoints_with_the_plain_one(tmp_path: Path) -> None:
    model = Two()
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    loaded = save(tmp_path, compiled, torch.optim.SGD(compiled.parameters(), 0.1))
    plain = Two()
    apply(loaded, plain, torch.optim.SGD(plain.parameters(), 0.1))
    assert_same_weights(model, plain)


def test_the_parts_of_a_run_that_a_path_can_mean(tmp_path: Path) -> None:
    model = Two()
    loaded = save(tmp_path / "checkpoints", model, torch.optim.SGD(model.parameters(), 0.1))
    for path in (tmp_path, tmp_path / "checkpoints", loaded.path):
        assert load(find_checkpoint(path)).path == loaded.path
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="empty has no checkpoint"):
        find_checkpoint(empty)
    with pytest.raises(CheckpointError, match=r"nnn cannot be looked at \(File name too long\)"):
        find_checkpoint(tmp_path / ("n" * 300))
    with pytest.raises(CheckpointError, match=r"nnn cannot be looked at \(File name too long\)"):
        export_weights(loaded.path, tmp_path / ("n" * 300) / "weights.safetensors")
