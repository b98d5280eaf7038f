"""The writer: what is kept, what is refused, what other jobs and failing disks do to it."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from checkpointing import POSITION, Two
from slipstream.durable import write_file_durably
from slipstream.errors import CheckpointError
from slipstream.train.checkpoint import CheckpointWriter, TrainState, latest, load, store
from slipstream.train.checkpoint.manifest import Manifest
from slipstream.train.checkpoint.snapshot import Snapshot, SnapshotBuffers


def state_of(value: float) -> TrainState:
    """A model whose scale is `value`."""
    model = Two()
    torch.nn.init.constant_(model.scale, value)
    return TrainState(model=model, optimizer=SGD(model.parameters(), 0.1), position=POSITION)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def scale_in(folder: Path) -> float:
    path = latest(folder)
    assert path is not None
    return float(load(path).model["scale"])


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    accuracies = [0.5, 0.9, 0.7, None, 0.8, float("nan")]
    with CheckpointWriter(tmp_path, keep_last=2, keep_best=1) as writer:
        for step, accuracy in enumerate(accuracies, start=1):
            writer.save(state_of(step), step, accuracy)
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert load(tmp_path / "step-00000002").metric == 0.9
    assert load(tmp_path / "step-00000006").metric is None
    # The best of an earlier job is still the best for the next one.
    with CheckpointWriter(tmp_path, keep_last=1, keep_best=1) as writer:
        writer.save(state_of(7), 7, 0.6)
    assert names(tmp_path) == ["step-00000002", "step-00000007"]
    assert hidden(tmp_path) == []


def test_without_keep_best_only_the_newest_stay(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep_last=1, keep_best=0) as writer:
        for step in (1, 2, 3):
            writer.save(state_of(step), step, 1.0 / step)
    assert names(tmp_path) == ["step-00000003"]
    with pytest.raises(CheckpointError, match="keep_last is 0"):
        CheckpointWriter(tmp_path, keep_last=0)


def test_non_finite_weights_push_no_healthy_checkpoint_out(tmp_path: Path) -> None:
    # Case 26: keep-last-3, a save each step, all weights become NaN at step 4.
    warnings: list[str] = []
    with CheckpointWriter(tmp_path, keep_last=3, warn=warnings.append) as writer:
        for step in range(1, 10):
            healthy = step < 4
            done = writer.save(state_of(step if healthy else float("nan")), step)
            assert done.wait(60)
            assert (done.path is not None) == healthy
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert scale_in(tmp_path) == 3
    assert len(warnings) == 6
    assert "no checkpoint was saved at step 4: scale is not finite" in warnings[0]


def test_infinite_momentum_is_refused_and_a_mask_of_infinities_is_not(tmp_path: Path) -> None:
    state = state_of(1)
    state.model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    with CheckpointWriter(tmp_path, warn=lambda _: None) as writer:
        assert writer.save(state, 1, block=True).path is not None
        weight = state.model.get_parameter("first.weight")
        poison = torch.full_like(weight, float("inf"))
        state.optimizer.state[weight]["momentum_buffer"] = poison
        done = writer.save(state, 2, block=True)
        assert done.path is None
        assert "optimizer state first.weight/momentum_buffer is not finite" in str(done.error)
        poison.zero_()
        state.model.get_buffer("mask").fill_(float("nan"))
        assert "mask is not finite" in str(writer.save(state, 3, block=True).error)


class Gate:
    """Holds the writing thread before it publishes, until `open` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        publish = store.Store.publish

        def wait(held: store.Store, snapshot: Snapshot, step: int, metric: float | None) -> Path:
            self.reached.set()
            assert self._open.wait(60)
            return publish(held, snapshot, step, metric)

        monkeypatch.setattr(store.Store, "publish", wait)

    def open(self) -> None:
        self._open.set()


def test_training_may_change_everything_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    state = state_of(1)
    with CheckpointWriter(tmp_path) as writer:
        done = writer.save(state, 1)
        assert gate.reached.wait(60)
        assert not done.wait(0)
        with torch.no_grad():
            state.model.get_parameter("scale").fill_(99)
        gate.open()
    assert done.path == tmp_path / "step-00000001"
    assert scale_in(tmp_path) == 1


def test_snapshots_reuse_their_memory() -> None:
    buffers = SnapshotBuffers()
    where = []
    for value in (1, 2):
        snapshot = buffers.take(state_of(value))
        tensors = snapshot.tensors["model.safetensors"]
        assert float(tensors["scale"]) == value
        where.append({name: t.data_ptr() for name, t in tensors.items()})
    assert where[0] == where[1]


def test_a_state_that_no_checkpoint_can_hold_raises_at_once(tmp_path: Path) -> None:
    state = state_of(1)
    state.counters = {"file": Path("x")}
    with CheckpointWriter(tmp_path) as writer:
        with pytest.raises(CheckpointError, match="counters/file is a"):
            writer.save(state, 1)
        state.counters = {}
        assert writer.save(state, 1, block=True).path is not None


def test_ranks_that_do_not_write_touch_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with CheckpointWriter(folder, is_writer=False) as writer:
        done = writer.save(state_of(1), 1)
        assert done.wait(0)
        assert (done.path, done.error) == (None, None)
    assert not folder.exists()


def failing(monkeypatch: pytest.MonkeyPatch, failures: int, error: Callable[[], Exception]) -> None:
    """Make the next `failures` attempts to publish fail in the middle."""
    write = write_file_durably
    left = failures

    def flaky(path: Path, data: bytes) -> None:
        nonlocal left
        if left:
            left -= 1
            raise error()
        write(path, data)

    monkeypatch.setattr(store, "write_file_durably", flaky)


def full() -> Exception:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_failed_write_is_repeated_then_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    warnings: list[str] = []
    writer = CheckpointWriter(tmp_path, warn=warnings.append, retry_delays_seconds=(0, 0))
    writer.save(state_of(1), 1, block=True)
    failing(monkeypatch, failures, full)
    done = writer.save(state_of(2), 2, block=True)
    if failures < 3:
        assert done.path == tmp_path / "step-00000002"
        assert not warnings
    else:
        assert warnings == [done.error]
        assert "step 2 could not be written" in warnings[0]
        assert "after 3 attempts" in warnings[0]
        assert scale_in(tmp_path) == 1
        assert writer.save(state_of(3), 3, block=True).path is not None
    assert len(hidden(tmp_path)) == 1  # our lock
    writer.close()
    assert hidden(tmp_path) == []


def test_closing_does_not_wait_for_the_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 2, full)
    with CheckpointWriter(tmp_path, retry_delays_seconds=(3600, 3600)) as writer:
        done = writer.save(state_of(1), 1)
    assert done.path == tmp_path / "step-00000001"


def test_our_own_fault_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 1, lambda: ZeroDivisionError("ours"))
    writer = CheckpointWriter(tmp_path)
    done = writer.save(state_of(1), 1)
    assert done.wait(60)
    assert done.path is None
    with pytest.raises(CheckpointError, match="ended by a fault") as raised:
        writer.save(state_of(2), 2)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    writer.close()


def test_a_second_save_of_a_step_replaces_nothing_before_it_is_complete(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep_last=1, keep_best=0) as writer:
        writer.save(state_of(1), 5)
        done = writer.save(state_of(2), 5, block=True)
        assert names(tmp_path) == ["step-00000005-r1"]
        assert done.path is not None
    assert scale_in(tmp_path) == 2


def test_latest_is_what_was_saved_last_even_after_going_back(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep_last=9) as writer:
        for step in (100, 200, 300):
            writer.save(state_of(step), step)
    # Resumed from step 100: the run goes on from there, the abandoned 200 and 300 do not.
    with CheckpointWriter(tmp_path, keep_last=2, keep_best=0) as writer:
        writer.save(state_of(150), 150)
    assert scale_in(tmp_path) == 150
    assert names(tmp_path) == ["step-00000150", "step-00000300"]


def test_latest_passes_over_a_damaged_one_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert latest(tmp_path / "absent") is None
    with CheckpointWriter(tmp_path) as writer:
        writer.save(state_of(1), 1)
        writer.save(state_of(2), 2)
    (tmp_path / "step-00000002" / "manifest.json").write_bytes(b"")
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert "step-00000002/manifest.json cannot be used" in caplog.text
    # A damaged one does not count, and is left for its owner to look at.
    with CheckpointWriter(tmp_path, keep_last=1, keep_best=0) as writer:
        writer.save(state_of(3), 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = tmp_path / ".writer-00000000deadbeef-new-01234567"
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".writer-00000000deadbeef.lock").touch()
    strangers = tmp_path / ".writer-notes"
    strangers.touch()
    with CheckpointWriter(tmp_path) as living:
        (lock,) = (name for name in hidden(tmp_path) if name.endswith(".lock"))
        writing = tmp_path / f"{lock.removesuffix('.lock')}-new-01234567"
        writing.mkdir()
        with CheckpointWriter(tmp_path) as second:
            assert not dead.exists()
            assert writing.exists()
            assert living.save(state_of(1), 1, block=True).path == tmp_path / "step-00000001"
            assert second.save(state_of(2), 1, block=True).path == tmp_path / "step-00000001-r1"
    assert hidden(tmp_path) == [".writer-notes"]


def test_two_jobs_in_one_folder_lose_nothing(tmp_path: Path) -> None:
    def job(value: int) -> None:
        with CheckpointWriter(tmp_path, keep_last=2, keep_best=0) as writer:
            for step in range(8):
                assert writer.save(state_of(value), step, block=True).path is not None

    threads = [threading.Thread(target=job, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scale_in(tmp_path) in (1, 2)
    assert len(names(tmp_path)) == 2
    assert hidden(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file/checkpoints \(Not a"):
        CheckpointWriter(tmp_path / "file" / "checkpoints")


def test_manifests_count_the_saves(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep_last=9) as writer:
        for step in (5, 3, 4):
            writer.save(state_of(step), step)
    found, broken = store.scan(tmp_path)
    manifests: list[Manifest] = [item.manifest for item in found]
    assert not broken
    assert [(m.sequence, m.step) for m in manifests] == [(1, 5), (2, 3), (3, 4)]
