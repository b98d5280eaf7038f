"""A program for test_checkpoint_kill.py: forks savers and kills them, or takes their disk away.

It imports torch once and has one thread, so that a fork costs milliseconds and is safe. Every
answer goes to standard output as one JSON document; the test asserts.
"""

import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.train.checkpoint import (
    CheckpointWriter,
    Position,
    TrainState,
    apply,
    latest,
    load,
)

# Python reports these before it acts. Imports open and list too: there the names are looked at.
_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
_EVENTS_BY_NAME = {"open", "os.listdir"}
_POSITION = Position(epoch=0, step_in_epoch=0, world_size=1, global_batch_size=1)


class Model(nn.Module):
    """Weights whose value is the step at which they were saved."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(numel // 2))
        self.b = nn.Parameter(torch.zeros(numel - numel // 2))


def state_of(step: int, numel: int) -> TrainState:
    """Weights and momentum that are `step` everywhere."""
    model = Model(numel)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter]["momentum_buffer"] = parameter.detach().clone()
    return TrainState(model=model, optimizer=optimizer, position=_POSITION)


def loaded_step(folder: Path, numel: int) -> int:
    """Step of the latest checkpoint, after all of it was read and compared."""
    path = latest(folder)
    if path is None:
        return 0
    loaded = load(path)
    state = state_of(0, numel)
    apply(loaded, state.model, state.optimizer)
    for parameter in state.model.parameters():
        assert bool((parameter == loaded.step).all()), path
        momentum = state.optimizer.state[parameter]["momentum_buffer"]
        assert bool((momentum == loaded.step).all()), path
    return loaded.step


def hidden(folder: Path) -> list[str]:
    """Names that no reader looks at."""
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Operations:
    """Calls `act(number)` before each file operation on `folder`, fsync included, while armed."""

    def __init__(self, folder: Path, act: Callable[[int], None]) -> None:
        self.armed = False
        self._folder = str(folder)
        self._act = act
        self._count = 0
        self._fsync = os.fsync
        os.fsync = self._flush  # type: ignore[assignment]
        sys.addaudithook(self._hook)

    def _event(self) -> None:
        if self.armed:
            self._count += 1
            self._act(self._count)

    def _hook(self, name: str, arguments: tuple[Any, ...]) -> None:
        ours = name in _EVENTS_BY_NAME and str(arguments[0]).startswith(self._folder)
        if ours or name in _EVENTS:
            self._event()

    def _flush(self, descriptor: Any) -> None:
        self._event()
        self._fsync(descriptor)


def one_save(folder: Path, step: int, numel: int) -> None:
    with CheckpointWriter(folder, keep_last=1, keep_best=0) as writer:
        done = writer.save(state_of(step, numel), step, block=True)
        assert done.path is not None, done.error


def kill_at_each_operation(folder: Path) -> dict[str, Any]:
    """SIGKILL before the first, second, ... file operation of open, save, rotate and close.

    Each trial starts from a checkpoint of step 1 and what a writer killed in a save left.
    """
    numel, steps, leftovers, cleaned = 64, [], [], []
    start = folder / "start"
    one_save(start, 1, numel)
    shutil.copytree(start / "step-00000001", start / ".writer-0123456789abcdef-new-01234567")
    for number in range(1, 1000):
        trial = folder / str(number)
        shutil.copytree(start, trial)

        def work(number: int = number, trial: Path = trial) -> None:
            def act(count: int) -> None:
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            Operations(trial, act).armed = True
            one_save(trial, 2, numel)

        _, status = os.waitpid(fork(work), 0)
        steps.append(loaded_step(trial, numel))
        leftovers.append(len(hidden(trial)))
        CheckpointWriter(trial).close()
        assert loaded_step(trial, numel) == steps[-1], trial
        cleaned.append(hidden(trial))
        if status == 0:
            return {"steps": steps, "leftovers": leftovers, "cleaned": cleaned}
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, trial
    raise RuntimeError("a save has more file operations than there are trials")


def kill_at_random_moments(folder: Path, kills: int, numel: int) -> dict[str, Any]:
    """SIGKILL savers that do nothing but save, after a random time of up to two saves."""
    started = time.perf_counter()
    one_save(folder, 1, numel)
    save_seconds = time.perf_counter() - started
    chance = random.Random(0)
    confirmed, loaded = [1], [1]
    for _ in range(kills):
        receive, send = os.pipe()

        def work(send: int = send) -> None:
            with CheckpointWriter(folder, keep_last=2, keep_best=0) as writer:
                for step in range(loaded[-1] + 1, 10**6):
                    done = writer.save(state_of(step, numel), step, block=True)
                    assert done.path is not None, done.error
                    os.write(send, b"%d\n" % step)

        child = fork(work)
        os.close(send)
        time.sleep(chance.uniform(0, 2 * save_seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(receive) as said:
            told = [int(line) for line in said.read().split()]
        confirmed.append(told[-1] if told else loaded[-1])
        loaded.append(loaded_step(folder, numel))
    CheckpointWriter(folder).close()
    return {"confirmed": confirmed, "loaded": loaded, "hidden": hidden(folder)}


def fail_at_each_operation(folder: Path, *, once: bool) -> dict[str, Any]:
    """A full disk at the first, second, ... operation of a save: one time, or from there on."""
    results: list[dict[str, Any]] = []
    for number in range(1, 1000):

        def work(number: int = number) -> dict[str, Any]:
            reached = False

            def act(count: int) -> None:
                nonlocal reached
                if count == number or (count > number and not once):
                    reached = True
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            operations = Operations(folder, act)

            def full(on: bool) -> None:
                operations.armed = on

            return save_on_a_full_disk(folder / str(number), full, 64) | {"reached": reached}

        results.append(answer_of(work))
        if not results[-1]["reached"]:
            return {"results": results}
    raise RuntimeError("a save has more file operations than there are trials")


def limit_file_size(folder: Path, numel: int) -> dict[str, Any]:
    """The kernel stops each write in the middle of the file: a short write, then an error."""

    def full(on: bool) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (numel if on else most, most))

    return answer_of(lambda: save_on_a_full_disk(folder, full, numel))


def save_on_a_full_disk(folder: Path, full: Callable[[bool], None], numel: int) -> dict[str, Any]:
    """Save while the disk is full, look, then save with space again, by the same writer."""
    warnings: list[str] = []
    before = 1
    one_save(folder, before, numel)
    with CheckpointWriter(
        folder, keep_last=1, keep_best=0, warn=warnings.append, retry_delays_seconds=(0, 0)
    ) as writer:
        full(True)
        first = writer.save(state_of(before + 1, numel), before + 1, block=True)
        full(False)
        between = loaded_step(folder, numel) - before
        second = writer.save(state_of(before + 2, numel), before + 2, block=True)
        left = hidden(folder)
    return {
        "first": first.path is not None,
        "error": first.error,
        "warnings": warnings,
        "between": between,
        "second": second.path is not None,
        "after": loaded_step(folder, numel) - before,
        "hidden": len(left),
        "names": sorted(os.listdir(folder)),
    }


def answer_of(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` returns in a child: hooks and limits that it sets end with it."""
    receive, send = os.pipe()
    child = fork(lambda: write_all(send, json.dumps(work())))
    os.close(send)
    with os.fdopen(receive) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("a saver failed; its traceback is above")
    answer: dict[str, Any] = json.loads(text)
    return answer


def write_all(descriptor: int, text: str) -> None:
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def main() -> None:
    """Run every trial in its own folder under the one that is named."""
    root = Path(sys.argv[1])
    # torch imports more at the first use of an optimizer: once here, not in each child.
    state_of(1, 64)
    trials: dict[str, Callable[[Path], dict[str, Any]]] = {
        "kill_operations": kill_at_each_operation,
        "kill_random": lambda folder: kill_at_random_moments(folder, 50, 2**20),
        "error_once": lambda folder: fail_at_each_operation(folder, once=True),
        "error_on": lambda folder: fail_at_each_operation(folder, once=False),
        "limit": lambda folder: limit_file_size(folder, 2**18),
    }
    results = {}
    for name, trial in trials.items():
        started = time.perf_counter()
        results[name] = trial(root / name)
        print(name, f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
