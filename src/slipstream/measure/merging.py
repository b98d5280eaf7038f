"""From recorded steps to one rank's medians, and from all ranks' medians to the trace they share.

Over the steps: the median, with the interquartile range as spread. Over the ranks: the slowest
rank's, gradient by gradient, since a collective waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import ValidationError

from slipstream.errors import RanksDiffer, TraceError
from slipstream.measure.clocks import Clock
from slipstream.measure.recorder import RawStep
from slipstream.measure.spread import median_and_spread
from slipstream.trace import Trace, TraceGradient, parameters_sha256
from slipstream.words import percent

_LATE = 0.9

Medians = dict[str, Any]


def medians(
    steps: Sequence[RawStep],
    clock: Clock,
    order: Sequence[str],
    points: Mapping[str, int | None],
) -> Medians:
    """One rank's part of the trace, in a form that JSON can hold.

    order: the parameters' names. points: at the call of which module each parameter must be there
    (None: unknown, so from the start). steps: at least one. Every number is a pair of median and
    spread, in seconds.
    """
    seconds = [_seconds_of(step, clock, order, points) for step in steps]
    result: Medians = {
        part: median_and_spread([step[part] for step in seconds])
        for part in ("input", "forward", "update")
    }
    for part in ("ready", "needed"):
        result[part] = [
            median_and_spread(values)
            for values in zip(*(step[part] for step in seconds), strict=True)
        ]
    result["samples"] = max(step.samples for step in steps)
    return result


def _seconds_of(
    step: RawStep, clock: Clock, order: Sequence[str], points: Mapping[str, int | None]
) -> dict[str, Any]:
    """One step's parts in seconds; a gradient that did not come counts as ready at the end."""
    forward = min(
        step.points.values(), key=lambda mark: clock.seconds(step.began, mark), default=step.began
    )
    ready = {name: clock.seconds(step.backward, mark) for name, mark in step.ready.items()}
    last = max(ready.values())
    forward_seconds = clock.seconds(forward, step.backward)
    needed = []
    for name in order:
        point = points[name]
        mark = forward if point is None else step.points.get(point, forward)
        needed.append(min(forward_seconds, max(0.0, clock.seconds(forward, mark))))
    update = clock.seconds(step.backward, step.ended) - last - step.waited_seconds
    return {
        "input": max(0.0, clock.seconds(step.began, forward)),
        "forward": forward_seconds,
        "update": max(0.0, update),
        "ready": [ready.get(name, last) for name in order],
        "needed": needed,
    }


def merged(
    everyone: Sequence[Medians],
    parameters: Sequence[tuple[str, int, str]],
    *,
    model: str,
    batch_size: int | None,
    note: str,
) -> Trace:
    """The trace of all ranks: each number from the rank on which it is largest.

    parameters: names, numbers of elements and dtypes, in the order of the ranks' `ready`.
    Raises TraceError for numbers that make no trace.
    """

    def slowest(*path: str | int) -> tuple[float, float]:
        found = []
        for rank in everyone:
            value: Any = rank
            for key in path:
                value = value[key]
            found.append((float(value[0]), float(value[1])))
        return max(found)

    samples = batch_size or max(int(rank["samples"]) for rank in everyone)
    if samples < 1:
        raise TraceError(
            "The model's forward is given no tensor that would tell the batch size; say it: "
            "batch_size=..."
        )
    times: dict[str, Any] = {}
    for part in ("input", "forward", "update"):
        times[f"{part}_seconds"], times[f"{part}_spread_seconds"] = slowest(part)
    try:
        gradients = [
            TraceGradient(
                name=name,
                numel=numel,
                dtype=cast(Any, dtype),
                ready_seconds=slowest("ready", index)[0],
                ready_spread_seconds=slowest("ready", index)[1],
                needed_seconds=min(times["forward_seconds"], slowest("needed", index)[0]),
            )
            for index, (name, numel, dtype) in enumerate(parameters)
        ]
        gradients.sort(key=lambda gradient: gradient.ready_seconds)
        return Trace(
            model=model,
            parameters_sha256=parameters_sha256(gradients),
            batch_size=samples,
            **times,
            gradients=tuple(gradients),
            note=note,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the step"
        wrong = first["msg"].removeprefix("Value error, ")
        raise TraceError(f"What was recorded makes no trace: {field}: {wrong}.") from None


def check_alike(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises RanksDiffer, on every rank alike, unless all ranks are about to record the same.

    Each rank's: `parameters` (name, elements, dtype) and `steps`, in words.
    """
    zero = everyone[0]
    for rank, other in enumerate(everyone[1:], start=1):
        if other["steps"] != zero["steps"]:
            raise RanksDiffer(
                f"Ranks differ: rank 0 profiles {zero['steps']} and rank {rank} {other['steps']}. "
                "Profile the same number of steps on every rank."
            )
        ours = [tuple(row) for row in zero["parameters"]]
        theirs = [tuple(row) for row in other["parameters"]]
        if ours == theirs:
            continue
        absent = ("nothing", 0, "")
        length = max(len(ours), len(theirs))
        ours += [absent] * (length - len(ours))
        theirs += [absent] * (length - len(theirs))
        mine, its = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
        raise RanksDiffer(
            f"Ranks differ: rank 0 profiles the parameter {_words(mine)} where rank {rank} has "
            f"{_words(its)}. Profile the same model on every rank."
        )


def _words(row: Sequence[Any]) -> str:
    name, numel, dtype = row
    return f"{name!r} ({numel} x {dtype})" if dtype else "none"


def lateness(trace: Trace, *, compiled_whole: bool) -> str:
    """A sentence on gradients that all come at the end of backward; empty where they do not."""
    first = trace.gradients[0].ready_seconds / trace.backward_seconds
    if first < _LATE or len(trace.gradients) == 1:
        return ""
    cause = "the model was compiled whole" if compiled_whole else "as in a model compiled whole"
    return (
        f" The first gradient is ready at {percent(first, 0)} of backward ({cause}): hardly any "
        "communication can be hidden behind it. Compile block by block instead."
    )
