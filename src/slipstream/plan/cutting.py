"""From a half of the step to its buckets: dtypes apart, one planner's cuts, the cheapest ways.

A bucket has one dtype, so every dtype is a lane. The lane with the most bytes is cut by the
planner; each other lane is one bucket (or as few as `max_bytes` allows), which stands where its
last gradient becomes ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.costs import Choice, Curve, least_of
from slipstream.plan.halves import Half, charged_bytes
from slipstream.plan.lane import Cuts, Lane, Other
from slipstream.plan.model import Bucket
from slipstream.trace import ITEM_BYTES, TraceGradient

Cutter = Callable[[Lane], Cuts]


def cut_half(
    half: Half, choices: Sequence[Choice], cutter: Cutter, max_bytes: int | None = None
) -> list[list[TraceGradient]]:
    """The buckets of a half in the order of their last gradients; max_bytes: of one, in memory."""
    curve = least_of([choice.curve for choice in choices])
    lanes: dict[str, list[int]] = {}
    for position, gradient in enumerate(half.gradients):
        lanes.setdefault(gradient.dtype, []).append(position)
    main = max(lanes.values(), key=lambda lane: sum(half.gradients[at].bytes for at in lane))
    whole = [
        bucket
        for lane in lanes.values()
        if lane is not main
        for bucket in _within(lane, half, max_bytes)
    ]
    whole.sort(key=lambda bucket: bucket[-1])
    lane = _lane(main, whole, half, curve, max_bytes)
    start, buckets = 0, whole
    for cut in cutter(lane):
        buckets.append(main[start:cut])
        start = cut
    buckets.sort(key=lambda bucket: bucket[-1])
    return [[half.gradients[at] for at in bucket] for bucket in buckets]


def _lane(
    main: list[int],
    whole: list[list[int]],
    half: Half,
    curve: Curve,
    max_bytes: int | None,
) -> Lane:
    others, after = [], 0
    for bucket in whole:
        while after < len(main) and main[after] < bucket[-1]:
            after += 1
        seconds = curve.seconds(sum(half.charged[at] for at in bucket))
        others.append(Other(after, half.ready_seconds[bucket[-1]], seconds))
    item_bytes = ITEM_BYTES[half.gradients[main[0]].dtype]
    if max_bytes is not None:
        max_bytes = max_bytes * max(4, item_bytes) // item_bytes
    return Lane(
        ready_seconds=[half.ready_seconds[at] for at in main],
        num_bytes=[half.charged[at] for at in main],
        curve=curve,
        max_bytes=max_bytes,
        others=tuple(others),
    )


def _within(lane: list[int], half: Half, max_bytes: int | None) -> list[list[int]]:
    """A lane cut into as few buckets as the limit allows; a larger gradient travels alone."""
    buckets: list[list[int]] = []
    room = -1
    for position in lane:
        size = half.gradients[position].bytes
        if not buckets or (max_bytes is not None and size > room):
            buckets.append([])
            room = max_bytes or 0
        buckets[-1].append(position)
        room -= size
    return buckets


def as_buckets(
    gradients: Sequence[Sequence[TraceGradient]], choices: Sequence[Choice]
) -> tuple[Bucket, ...]:
    """Plan buckets, each with the cheapest of the choices for its size; the first of equal ones."""
    found = []
    for members in gradients:
        charged = sum(charged_bytes(gradient) for gradient in members)
        choice = min(choices, key=lambda choice: choice.curve.seconds(charged))
        found.append(
            Bucket.model_validate(
                {
                    "gradients": tuple(gradient.name for gradient in members),
                    "bytes": sum(gradient.bytes for gradient in members),
                    "collective": choice.collective,
                    "wire": choice.wire,
                }
            )
        )
    return tuple(found)
