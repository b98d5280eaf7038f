"""The other ranks: small agreements with them, and what can be learnt of them when one is lost.

Backends say that a connection broke, or that time ran out; they do not say who is missing. So a
rank that fails posts what it knows to the store, closes its connections, so that ranks that wait
for it learn it too, and reads for two seconds what the others posted. In steady state none of this
costs anything.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from slipstream.comm.hanging_up import hang_up
from slipstream.comm.torch_comm import broadcast_tensors, gather_objects
from slipstream.errors import RankFailure, RanksDiffer, SlipstreamError, UnsupportedModel

_REPORT_SECONDS = 2.0
_STORE_SECONDS = 3.0
_POLL_SECONDS = 0.02
_MAX_REPORT_CHARACTERS = 2000
_CONSEQUENCES = re.compile(
    r"[Cc]onnection (closed|reset)|Broken pipe|[Ss]ocket closed|[Tt]imed? ?out|has not ended within"
)
"""What is said when another rank is gone, and not what went wrong there."""


class Peers:
    """The ranks of a group, seen from one of them; `group=None` means a world of one rank.

    store: where failures are posted; by default the store under the group. timeout_seconds bounds
    every agreement.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        store: Store | None,
        timeout_seconds: float,
        device: torch.device,
    ) -> None:
        self._group = group
        self._store = store if store is not None or group is None else group.get_group_store()
        self._device = device
        self.timeout_seconds = timeout_seconds
        self._explained: SlipstreamError | None = None
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Every rank's JSON-able `value` in rank order. Raises RankFailure that says `doing`."""
        if self._group is None:
            return [value]
        try:
            return gather_objects(value, self._group, self._device)
        except RuntimeError as error:
            raise self.failure(error, doing) from error

    def broadcast(self, tensors: Mapping[str, torch.Tensor], doing: str) -> None:
        """Overwrites the tensors with rank 0's; names are for errors.

        Names, dtypes and shapes are compared first, because backends end the whole process when
        sizes differ. Raises, on every rank: RanksDiffer that names the first difference,
        UnsupportedModel for sparse tensors; RankFailure that says `doing`.
        """
        if self._group is None:
            return
        mine = [[name, _form(tensor)] for name, tensor in tensors.items()]
        digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
        if len(set(self.gather(digest, doing))) > 1:
            raise RanksDiffer(_first_difference(self.gather(mine, doing), doing))
        for name, tensor in tensors.items():
            if tensor.layout is not torch.strided:
                raise UnsupportedModel(
                    f"Tensor {name!r} is sparse ({_form(tensor)}) and cannot be broadcast; make "
                    "it dense, or keep it the rank's own: GradientSync(..., ignore=[its name])."
                )
        try:
            broadcast_tensors(tensors.values(), self._group)
        except RuntimeError as error:
            raise self.failure(error, doing) from error

    def gather_by_store(self, key: str, value: Any) -> dict[int, Any]:
        """Every rank's value under `key`, through the store; ranks that do not come are left out.

        For the rare moments at which a rank cannot know whether the others take part. Waits for
        at most `timeout_seconds`.
        """
        if self._store is None:
            return {0: value}
        store, found = self._store, dict[int, Any]()

        def exchange() -> None:
            store.set(f"{key}/{self.rank}", json.dumps(value))
            found.update(self._read(key, time.monotonic() + self.timeout_seconds))

        _within(self.timeout_seconds + _STORE_SECONDS, exchange)
        return found

    def failure(self, error: BaseException, doing: str) -> SlipstreamError:
        """What to raise when a collective failed while `doing`: names the ranks that are missing.

        Posts this rank's error and closes its connections in the group, in which nothing can travel
        afterwards. Then waits two seconds for the others' errors and tells apart the ranks that
        reported and those that did not; an error that no backend raises is this rank's own, and it
        waits for nobody. Never blocks for longer than a few seconds.
        """
        if isinstance(error, SlipstreamError) and not self._is_unexplained(error):
            return error
        if self._store is None:
            return RankFailure(str(error))
        self._explained = self._explain(error, doing)
        return self._explained

    def _is_unexplained(self, error: SlipstreamError) -> bool:
        """Whether it says that ranks were waited for in vain, and nothing of them yet."""
        return isinstance(error, RankFailure) and error is not self._explained

    def _explain(self, error: BaseException, doing: str) -> SlipstreamError:
        is_own = not _is_backends(error)
        text = _with_kind(error) if is_own else str(error)
        reports: dict[int, Any] = {}

        def read() -> None:
            reports.update(self._read("failed", time.monotonic() + _REPORT_SECONDS))

        told = _within(_STORE_SECONDS, lambda: self._post(text, doing, cause=is_own))
        # after the post, which those will look for who fail because of this
        group = self._group
        if group is not None:
            _within(_STORE_SECONDS, lambda: hang_up(group))
        if is_own:
            return SlipstreamError(f"Rank {self.rank} cannot go on while {doing}: {text}")
        if not told or not _within(_REPORT_SECONDS + _STORE_SECONDS, read):
            return RankFailure(
                f"Rank {self.rank} lost its peers while {doing}, and the store through which ranks "
                "find each other no longer answers: the process that hosts it (the launcher or "
                "rank 0) has ended or is frozen. Start the job again; --resume goes on from the "
                f"last checkpoint. ({_first_line(error)})"
            )
        return RankFailure(self._describe(error, doing, reports))

    def post_failure(self, text: str, doing: str, *, cause: bool = False) -> None:
        """Posts this rank's error for the others to read; `cause` marks an error of its own.

        Gives up after a few seconds: the host of the store may be what was lost.
        """
        if self._store is not None:
            _within(_STORE_SECONDS, lambda: self._post(text, doing, cause=cause))

    def _post(self, text: str, doing: str, *, cause: bool) -> None:
        assert self._store is not None
        report = {"doing": doing, "error": text[:_MAX_REPORT_CHARACTERS], "cause": cause}
        self._store.set(f"failed/{self.rank}", json.dumps(report))

    def _read(self, key: str, deadline: float) -> dict[int, Any]:
        assert self._store is not None
        found: dict[int, Any] = {}
        while True:
            for rank in range(self.world_size):
                if rank not in found and self._store.check([f"{key}/{rank}"]):
                    found[rank] = json.loads(self._store.get(f"{key}/{rank}"))
            if len(found) == self.world_size or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_SECONDS)

    def _describe(self, error: BaseException, doing: str, reports: dict[int, Any]) -> str:
        causes = [
            f"rank {rank}: {report['error']}" for rank, report in reports.items() if report["cause"]
        ]
        if causes:
            return f"Rank {self.rank} cannot go on while {doing}, because of {'; '.join(causes)}"
        silent = [rank for rank in range(self.world_size) if rank not in reports]
        elsewhere = [
            f"rank {rank} was {report['doing']}"
            for rank, report in reports.items()
            if report["doing"] != doing
        ]
        elsewhere += [
            f"rank {rank} said: {_first_line(report['error'])}"
            for rank, report in reports.items()
            if rank != self.rank and not _CONSEQUENCES.search(report["error"])
        ]
        limit = f"limit {self.timeout_seconds:g} s"
        parts = [f"Rank {self.rank} lost its peers while {doing} ({limit})"]
        if silent:
            names = ", ".join(str(rank) for rank in silent)
            parts.append(
                f"no answer from rank {names}: it died, froze or never came to this point; "
                "look at its own log"
            )
        if elsewhere:
            parts.append(", ".join(elsewhere))
        parts.append(f"the backend said: {_first_line(error)}")
        return "; ".join(parts) + "."


def _within(seconds: float, action: Callable[[], None]) -> bool:
    """Runs `action` in a thread; whether it ended in time and the store did not fail it.

    Calls of a store have no limit of their own once its host cannot be reached, and they hold the
    client's lock meanwhile.
    """
    ended: list[bool] = []

    def run() -> None:
        try:
            action()
            ended.append(True)
        except RuntimeError:  # what every store raises when its host is gone
            ended.append(False)

    thread = threading.Thread(target=run, name="slipstream-store", daemon=True)
    thread.start()
    thread.join(seconds)
    return ended == [True]


def _is_backends(error: BaseException) -> bool:
    """Whether ranks are missing: a wait had no end, or a backend, which raises RuntimeErrors."""
    return type(error) is RuntimeError or isinstance(error, (RankFailure, dist.DistError))


def _with_kind(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _first_line(error: BaseException | str) -> str:
    """What went wrong, without the source line before it and the advice and stack after it."""
    text = str(error).strip() or repr(error)
    line = re.sub(r"^\[[^\]]*\]\s*", "", text.splitlines()[0])
    return re.split(r"\.\s", line, maxsplit=1)[0].rstrip(".")[:200]


def _form(tensor: torch.Tensor) -> str:
    """Dtype, shape and, where it is unusual, layout in words: `float32 [2, 3]`."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype} {list(tensor.shape)}{layout}".replace("torch.", "")


def _first_difference(everyone: Sequence[Sequence[Sequence[str]]], doing: str) -> str:
    """The first tensor in which a rank differs from rank 0; there is one."""
    nothing = ["", "missing"]
    for rank, theirs in enumerate(everyone[1:], start=1):
        for position in range(max(len(everyone[0]), len(theirs))):
            ours_is, theirs_is = (
                rows[position] if position < len(rows) else nothing
                for rows in (everyone[0], theirs)
            )
            if ours_is == theirs_is:
                continue
            return (
                f"Ranks differ while {doing}: {_words(ours_is)} on rank 0 stands where rank {rank} "
                f"has {_words(theirs_is)}. Give every rank the same parameters and buffers, or "
                "name what is the rank's own in `ignore`."
            )
    raise AssertionError("no rank differs")


def _words(row: Sequence[str]) -> str:
    return f"{row[0]!r} ({row[1]})" if row[0] else "nothing"
