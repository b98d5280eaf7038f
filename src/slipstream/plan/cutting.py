"""From a half of the step to its buckets: dtypes apart, one planner's cuts, the cheapest ways.

A bucket has one dtype, and its gradients may go the same ways, so every such kind is a lane (see
`menu.py`). The lane that takes the channel longest is cut by the planner; each other lane is one
bucket (or as few as `max_bytes` allows), which stands where its last gradient becomes ready. Where
some gradients may be sent sparsely neither lane is small: each is cut in its turn, twice, with the
buckets of the other one as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.costs import Curve
from slipstream.plan.halves import Half, charged_bytes
from slipstream.plan.lane import Cuts, Lane, Other
from slipstream.plan.menu import Menu
from slipstream.plan.model import Bucket
from slipstream.trace import ITEM_BYTES, TraceGradient

Cutter = Callable[[Lane], Cuts]


def cut_half(
    half: Half, menu: Menu, cutter: Cutter, max_bytes: int | None = None
) -> list[list[TraceGradient]]:
    """The buckets of a half in the order of their last gradients; max_bytes: of one, in memory."""
    lanes = menu.lanes(half.gradients)
    seconds = {
        key: menu.curve_of(key).seconds(sum(half.charged[at] for at in lane))
        for key, lane in lanes.items()
    }
    order = sorted(lanes, key=lambda key: -seconds[key])
    found = {key: _within(lane, half, max_bytes) for key, lane in lanes.items()}
    for key in [*order, *order] if menu.sparse else order[:1]:
        others = [
            (bucket, menu.curve_of(other))
            for other, buckets in found.items()
            if other != key
            for bucket in buckets
        ]
        others.sort(key=lambda other: other[0][-1])
        start, buckets = 0, []
        for cut in cutter(_lane(lanes[key], others, half, menu.curve_of(key), max_bytes)):
            buckets.append(lanes[key][start:cut])
            start = cut
        found[key] = buckets
    together = sorted((b for buckets in found.values() for b in buckets), key=lambda b: b[-1])
    return [[half.gradients[at] for at in bucket] for bucket in together]


def _lane(
    main: list[int],
    whole: list[tuple[list[int], Curve]],
    half: Half,
    curve: Curve,
    max_bytes: int | None,
) -> Lane:
    others, after = [], 0
    for bucket, its_curve in whole:
        while after < len(main) and main[after] < bucket[-1]:
            after += 1
        seconds = its_curve.seconds(sum(half.charged[at] for at in bucket))
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


def as_buckets(gradients: Sequence[Sequence[TraceGradient]], menu: Menu) -> tuple[Bucket, ...]:
    """Plan buckets, each with the cheapest of its choices for its size; the first of equal ones."""
    found = []
    for members in gradients:
        charged = sum(charged_bytes(gradient) for gradient in members)
        choices = menu.of_lane(menu.lane_of(members[0]))
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
