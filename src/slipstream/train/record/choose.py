"""Which display a rank gets."""

from __future__ import annotations

import sys
from typing import TextIO, cast

from slipstream.train.record.display import Display
from slipstream.train.record.live import LiveDisplay, is_capable
from slipstream.train.record.plain import PlainDisplay, SilentDisplay
from slipstream.train.record.unfailing import UnfailingStream


def open_display(*, rank: int, stream: TextIO | None = None) -> Display:
    """The display for `rank`: silent unless 0; live when `stream` (stderr) is a terminal."""
    if rank != 0:
        return SilentDisplay()
    stream = cast(TextIO, UnfailingStream(sys.stderr if stream is None else stream))
    if not stream.isatty():
        return PlainDisplay(stream)
    return LiveDisplay(stream) if is_capable(stream) else PlainDisplay(stream)
