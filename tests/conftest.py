"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# No test fails because the machine was busy, and the suite says the same of one commit every time.
# `make test ARGS=--hypothesis-profile=explore` looks for examples that nobody has seen.
settings.register_profile("slipstream", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("slipstream")

# A shell that starts the suite in the background has SIGINT ignored, which children inherit: tests
# that interrupt a program would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
