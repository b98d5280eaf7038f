"""What a rank of a job that somebody else started says when it fails."""

import os
import signal
from collections.abc import Iterator
from typing import NoReturn

import pytest

from slipstream.cli.ranks import as_rank
from slipstream.errors import DataError, LaunchError, SlipstreamError


class Left(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process does not end, and takes SIGTERM as before."""

    def leave(code: int) -> NoReturn:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LaunchError("rank 1 cannot reach rank 0"), "slipstream: rank 1 cannot reach rank 0\n"),
        (DataError("train.gz is damaged"), "slipstream: rank 1: train.gz is damaged\n"),
    ],
)
def test_the_rank_is_named_once(
    error: SlipstreamError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(Left):
        as_rank(fail, 1)
    assert capsys.readouterr().err == said
