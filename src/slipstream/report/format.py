"""Numbers in words, as the report uses them; see `slipstream.words`."""

from slipstream.words import count, duration, percent, plain, size, tidy

__all__ = ["count", "duration", "percent", "plain", "size", "tidy"]
