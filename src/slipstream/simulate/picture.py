"""A step as two lines of text: what computes, and which bucket is on the channel."""

from __future__ import annotations

from slipstream.simulate.step import StepSimulation

_LETTERS = {"input": "i", "forward": "f", "backward": "b", "update": "u", "wait": "."}
LEGEND = "i input, f forward, b backward, u update, . waits; buckets by their last digit"


def picture(step: StepSimulation, width: int = 72) -> tuple[str, str]:
    """(computation, channel), `width` letters each; a letter is what holds its middle.

    A bucket (and a part of the computation) that is shorter than a letter may not be seen.
    """
    computation, channel = [" "] * width, [" "] * width
    spans = [(s.start_seconds, s.end_seconds, _LETTERS[s.row]) for s in step.spans]
    trips = [(j.start_seconds, j.end_seconds, str(j.index % 10)) for j in step.journeys]
    for line, parts in ((computation, spans), (channel, trips)):
        for start, end, letter in parts:
            first = max(0, round(start / step.step_seconds * width))
            last = min(width, round(end / step.step_seconds * width))
            line[first:last] = letter * (last - first)
    return "".join(computation), "".join(channel).rstrip()
