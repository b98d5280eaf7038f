"""What holds for all tests."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# No test fails because the machine was busy, and the suite says the same of one commit every time.
# `make test ARGS=--hypothesis-profile=explore` looks for examples that nobody has seen.
settings.register_profile("slipstream", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("slipstream")

# A shell that starts the suite in the background has SIGINT ignored, which children inherit: tests
# that interrupt a program would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports torch. Ranks are threads here: with a pool of OpenMP threads for each they
# spin against one another. Ranks that torchrun starts have one thread, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def brief_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens how long a failed rank waits for the others' reports.

    For tests in which no other rank has one, so that nothing depends on how long that is.
    """
    monkeypatch.setattr("slipstream.comm.peers._REPORT_SECONDS", 0.2)
