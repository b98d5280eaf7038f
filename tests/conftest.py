"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# No test fails because the machine was busy.
settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")
