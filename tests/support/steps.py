"""Small recorded steps and costs for planners, and a forward simulated from the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from slipstream.cluster import Cluster
from slipstream.costs import Costs, Curve, Line
from slipstream.trace import Trace, TraceGradient

FOUR_NODES = Cluster.regular(4, 1)


def step_of(
    numels: Sequence[int],
    gap_seconds: float = 1.0,
    dtypes: Sequence[str] = (),
    forward_seconds: float = 0.0,
    input_seconds: float = 0.0,
    update_seconds: float = 0.0,
) -> Trace:
    """A step whose gradients become ready at equal gaps; g0 first, and needed last."""
    count = len(numels)
    return Trace(
        model="steps",
        batch_size=1,
        input_seconds=input_seconds,
        forward_seconds=forward_seconds,
        update_seconds=update_seconds,
        gradients=tuple(
            TraceGradient.model_validate(
                {
                    "name": f"g{index}",
                    "numel": numel,
                    "dtype": dtypes[index] if dtypes else "float32",
                    "ready_seconds": gap_seconds * (index + 1),
                    "needed_seconds": forward_seconds * (count - 1 - index) / count,
                }
            )
            for index, numel in enumerate(numels)
        ),
    )


def costs_of(curve: Curve, half: Curve | None = None) -> Costs:
    """Costs on four nodes, alike for all all-reduces that planners name themselves.

    half: of the native reduce-scatter and all-gather.
    """
    half = half or curve
    return Costs(
        FOUR_NODES,
        {
            ("native", "all_reduce", "float32"): curve,
            ("hierarchical", "all_reduce", "float32"): curve,
            ("ring", "all_reduce", "float32"): curve,
            ("native", "reduce_scatter", "float32"): half,
            ("native", "all_gather", "float32"): half,
        },
    )


def forward_end(trace: Trace, buckets: Sequence[Sequence[str]], half: Curve) -> float:
    """Input, updates and forward with gathers, simulated parameter by parameter from the barrier.

    The computation goes through the parameters in the order in which they are needed: it waits for
    the parameter's bucket, updates the parameter, and computes until the next one is needed.
    """
    sizes = {gradient.name: gradient.bytes for gradient in trace.gradients}
    arrival: dict[str, float] = {}
    clock = 0.0
    for bucket in buckets:
        clock += half.seconds(sum(sizes[name] for name in bucket))
        arrival |= dict.fromkeys(bucket, clock)
    # Equal needs in the order of planning read backwards: the last to be ready comes first.
    order = sorted(
        enumerate(trace.gradients), key=lambda entry: (entry[1].needed_seconds or 0.0, -entry[0])
    )
    now, done, total = trace.input_seconds, 0.0, sum(sizes.values())
    for _, gradient in order:
        needed = gradient.needed_seconds or 0.0
        now = max(now + needed - done, arrival[gradient.name])
        now += trace.update_seconds * (sizes[gradient.name] / total if total else 1 / len(order))
        done = needed
    return now + trace.forward_seconds - done


def every_cut(names: Sequence[str]) -> Iterator[list[list[str]]]:
    """All ways to cut a sequence into consecutive buckets."""
    for number in range(2 ** (len(names) - 1)):
        buckets = [[names[0]]]
        for position, name in enumerate(names[1:]):
            if number >> position & 1:
                buckets.append([])
            buckets[-1].append(name)
        yield buckets


@st.composite
def steps(draw: st.DrawFn, most: int = 12, dtypes: Sequence[str] = ("float32",)) -> Trace:
    """Steps of up to `most` gradients with irregular times, some of them at once."""
    count = draw(st.integers(1, most))
    gaps = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    forward = draw(st.integers(0, 100))
    ready, gradients = draw(st.integers(1, 20)), []
    for index, gap in enumerate(gaps):
        ready += gap
        gradients.append(
            TraceGradient.model_validate(
                {
                    "name": f"g{index}",
                    "numel": draw(st.integers(0, 40)),
                    "dtype": draw(st.sampled_from(dtypes)),
                    "ready_seconds": ready * 1e-3,
                    "needed_seconds": draw(st.integers(0, forward)) * 1e-3,
                }
            )
        )
    return Trace(
        model="steps",
        batch_size=1,
        input_seconds=draw(st.integers(0, 10)) * 1e-3,
        forward_seconds=forward * 1e-3,
        update_seconds=draw(st.integers(0, 10)) * 1e-3,
        gradients=tuple(gradients),
    )


lines = st.builds(
    Line,
    st.integers(0, 20).map(lambda thousandths: thousandths * 1e-3),
    st.integers(0, 100).map(lambda millionths: millionths * 1e-6),
)
