"""Saving while training goes on.

Policy, in the order in which things happen:

1. `save` copies the state on the calling thread (between two steps: the copy is consistent) and
   returns; a thread writes the copy. A save that comes while another is being written waits for
   it: there is one copy, not a growing queue.
2. Non-finite parameters or optimizer state are not written at all: a poisoned run must not push
   its last healthy checkpoints out of the folder.
3. A write that fails (quota, full or absent network disk) is repeated after each of
   `retry_delays_seconds`; then a warning is given and training goes on. Old checkpoints go only
   after a new one is complete on the device, so the last good one is always there.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.snapshot import (
    Snapshot,
    SnapshotBuffers,
    TrainState,
    find_nonfinite,
)
from slipstream.train.checkpoint.store import Store

_logger = logging.getLogger("slipstream.checkpoint")


class Save:
    """One save under way. `path` and `error` are set when `wait` has returned True."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.path: Path | None = None
        """The complete checkpoint; None if it was refused, failed, or this rank does not write."""
        self.error: str | None = None
        """Why there is none, a sentence that was also given as a warning."""
        self._done = threading.Event()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the save has succeeded or failed; False if the time was up before."""
        return self._done.wait(timeout_seconds)

    def finish(self, path: Path | None = None, error: str | None = None) -> None:
        """Set the outcome; for the writer only."""
        self.path, self.error = path, error
        self._done.set()


class CheckpointWriter:
    """Writes the checkpoints of a run into `folder`, in the background.

    Only the rank with `is_writer` touches the disk; on the others `save` does nothing, so that all
    ranks may run the same line. Use from one thread.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        is_writer: bool = True,
        warn: Callable[[str], None] = _logger.warning,
        retry_delays_seconds: Sequence[float] = (1.0, 5.0),
    ) -> None:
        """Open `folder`, removing what dead writers left in it.

        keep_last: newest checkpoints that stay, at least 1; keep_best: further ones that stay for
        the highest metric, 0 for none. warn: called with a sentence, from the writing thread.
        Raises CheckpointError where the folder cannot be written.
        """
        if keep_last < 1 or keep_best < 0:
            raise CheckpointError(
                f"keep_last is {keep_last} and keep_best {keep_best}: at least the newest"
                " checkpoint must stay, so set keep_last >= 1 and keep_best >= 0."
            )
        self._keep = keep_last, int(keep_best)
        self._warn = warn
        self._retry_delays_seconds = tuple(retry_delays_seconds)
        self._buffers = SnapshotBuffers()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        try:
            self._store = Store(folder) if is_writer else None
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {folder} ({error.strerror or error}): free"
                " space or fix its permissions."
            ) from error

    def save(
        self, state: TrainState, step: int, metric: float | None = None, *, block: bool = False
    ) -> Save:
        """Save `state` after `step` optimizer steps; the state may change once this returns.

        metric: higher is better, None where nothing was evaluated; a NaN counts as None. block:
        wait until the checkpoint is on the device or has failed for good. Raises CheckpointError
        only for a state that no checkpoint can hold; disk trouble becomes `Save.error` and a
        warning.
        """
        save = Save(step)
        if self._store is None:
            save.finish()
            return save
        self._join()
        snapshot = self._buffers.take(state)
        if metric is not None and metric != metric:
            metric = None
        self._thread = threading.Thread(
            target=self._run,
            args=(self._store, save, snapshot, metric),
            name=f"slipstream-checkpoint-{step}",
        )
        self._thread.start()
        if block:
            self._join()
        return save

    def close(self) -> None:
        """Wait for the save under way (its pauses between attempts are cut short), then let go."""
        self._closing.set()
        try:
            self._join()
        finally:
            if self._store is not None:
                self._store.close()
                self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise CheckpointError("the thread that writes checkpoints ended by a fault") from fault

    def _run(self, store: Store, save: Save, snapshot: Snapshot, metric: float | None) -> None:
        path: Path | None = None
        error: str | None = "the thread that writes checkpoints ended by a fault"
        try:
            path, error = self._write(store, save.step, snapshot, metric)
            if error:
                self._warn(error)
        except BaseException as fault:
            # Raised on the caller's thread at its next call: nobody would see it here.
            self._fault = fault
        finally:
            save.finish(path, error)

    def _write(
        self, store: Store, step: int, snapshot: Snapshot, metric: float | None
    ) -> tuple[Path | None, str | None]:
        poisoned = find_nonfinite(snapshot)
        if poisoned is not None:
            return None, (
                f"no checkpoint was saved at step {step}: {poisoned} is not finite;"
                " the checkpoints before it are kept."
            )
        path, error = self._publish(store, step, snapshot, metric)
        if path is not None:
            try:
                store.rotate(*self._keep)
            except OSError as trouble:
                self._warn(
                    f"old checkpoints in {store.folder} cannot be removed ({trouble}): they stay"
                    " and use space; remove them by hand."
                )
        return path, error

    def _publish(
        self, store: Store, step: int, snapshot: Snapshot, metric: float | None
    ) -> tuple[Path | None, str | None]:
        for attempts_left in reversed(range(len(self._retry_delays_seconds) + 1)):
            try:
                return store.publish(snapshot, step, metric), None
            except OSError as trouble:
                error = trouble
            if attempts_left:
                self._closing.wait(self._retry_delays_seconds[-attempts_left])
        return None, (
            f"the checkpoint of step {step} could not be written to {store.folder} after"
            f" {len(self._retry_delays_seconds) + 1} attempts ({error}); the checkpoints"
            " before it are kept: free space there."
        )
