"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# No test fails because the machine was busy.
settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")

# A shell that starts the suite in the background has SIGINT ignored, which children inherit: tests
# that interrupt a program would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
