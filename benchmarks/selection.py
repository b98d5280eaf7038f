"""Selection of k of n by magnitude on the CPU, one thread, against torch.topk and np.argpartition.

All start from the same float32 values and end with k indices and the values there: torch.topk of
|x| (`sorted=False`), numpy's argpartition of |x|, and our selectors. Torch has one thread. What
is compared runs in turn; each figure is a median over the rounds, a ratio the median of the rounds'
ratios.

* 25.6 million normal numbers, densities 0.001 and 0.01: `exact` against both, and against two reads
  of the data: twice a compiled loop that only takes the maximum of |x|. `exact` fused with the
  residual (gradient + residual, selection, what is sent taken out), in place and with the old
  residual kept. The approximate selectors `mstopk` (10 samplings) and `sampled`.
* `exact` on all-equal, all-zero, denormal and cubed normal numbers, against its normal time.
* `exact` from 2^16 elements on, the whole call, against the faster of torch.topk and argpartition.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import numba
import numpy as np
import numpy.typing as npt
import torch

from harness import Figure, at_least, at_most, finish, options
from markers import markdown_table
from slipstream.sparsify import ErrorFeedback, k_of, selector
from slipstream.words import count, duration

N = 25_600_000
DENSITIES = (0.001, 0.01)
Work = Callable[[], object]


@numba.njit(nogil=True, cache=True)
def largest_magnitude(bits: npt.NDArray[np.int32]) -> int:
    """One read of all the data, and as little else as can be."""
    most = np.int32(0)
    for i in range(len(bits)):
        most = max(most, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return int(most)


def times_of(works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in each round; they take turns, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(seconds: Mapping[str, list[float]], measured: str, baseline: str) -> float:
    """The median over the rounds of measured / baseline."""
    pairs = zip(seconds[measured], seconds[baseline], strict=True)
    return statistics.median(one / other for one, other in pairs)


def by_topk(values: torch.Tensor, k: int) -> object:
    """Selection with torch's own operation."""
    indices = torch.topk(values.abs(), k, sorted=False).indices
    return indices, values[indices]


def by_argpartition(values: torch.Tensor, k: int) -> object:
    """Selection with numpy's own operation."""
    array = values.numpy()
    indices = np.argpartition(np.abs(array), len(array) - k)[len(array) - k :]
    return indices, array[indices]


def normal(n: int) -> torch.Tensor:
    """[n] normal numbers."""
    return torch.from_numpy(np.random.default_rng(n).standard_normal(n, dtype=np.float32))


def operators(values: torch.Tensor, density: float) -> dict[str, Work]:
    """Everything that is compared at one density."""
    n = values.numel()
    k, array = k_of(density, n), values.numpy().view(np.int32)
    exact, mstopk, sampled = (selector(name) for name in ("exact", "mstopk", "sampled"))
    fused = ErrorFeedback(n, selector("exact"))
    kept = ErrorFeedback(n, selector("exact"), can_undo=True)
    return {
        "one read": lambda: largest_magnitude(array),
        "exact": lambda: exact.select(values, k),
        "exact, fused with the residual": lambda: fused.select(values, k),
        "exact, fused, the old residual kept": lambda: kept.select(values, k),
        "mstopk": lambda: mstopk.select(values, k),
        "sampled": lambda: sampled.select(values, k),
        "torch.topk": lambda: by_topk(values, k),
        "np.argpartition": lambda: by_argpartition(values, k),
    }


def odd_data(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Numbers that selections stumble over, as many as `values`."""
    return {
        "all equal": torch.full_like(values, 0.5),
        "all zero": torch.zeros_like(values),
        "denormal": values * 1e-40,
        "cubed normal": values**3,
    }


def spread(times: list[float]) -> str:
    """The median, and the span of the middle half."""
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{duration(middle)} ({duration(low)} to {duration(high)})"


def compare(
    values: torch.Tensor, density: float, rounds: int
) -> tuple[list[Figure], dict[str, float], list[str]]:
    """Figures, ratios and a row of times at one density."""
    seconds = times_of(operators(values, density), rounds)
    reads_allowed = {0.001: 1.5, 0.01: 2.2}[density]
    at, fused, kept = f"density {density:g}", *list(seconds)[2:4]
    found = {
        "torch.topk / exact": ratio(seconds, "torch.topk", "exact"),
        "np.argpartition / exact": ratio(seconds, "np.argpartition", "exact"),
        "exact / two reads": ratio(seconds, "exact", "one read") / 2,
        "fused / two reads": ratio(seconds, fused, "one read") / 2,
        "fused / exact": ratio(seconds, fused, "exact"),
        "fused, residual kept / exact": ratio(seconds, kept, "exact"),
        "mstopk / exact": ratio(seconds, "mstopk", "exact"),
        "sampled / exact": ratio(seconds, "sampled", "exact"),
    }
    is_goal = density == 0.001
    names = list(found)
    figures = [
        at_least(f"{name}, {at}", found[name], goal, " x", 1)
        if is_goal
        else Figure(f"{name}, {at}", f"{found[name]:.1f} x")
        for name, goal in zip(names[:2], (15, 5), strict=True)
    ]
    figures.append(at_most(f"{names[2]}, {at}", found[names[2]], reads_allowed, " x", 2))
    figures.append(at_most(f"{names[3]}, {at}", found[names[3]], 2 * reads_allowed, " x", 2))
    figures += [Figure(f"{name}, {at}", f"{found[name]:.2f} x") for name in names[4:]]
    row = [f"{density:g}", *(spread(times) for times in seconds.values())]
    return figures, {f"{name}, {at}": value for name, value in found.items()}, row


def small_calls(sizes: list[int], rounds: int) -> dict[str, float]:
    """exact / the faster of the two others, the whole call, by size and density."""
    found = {}
    for n in sizes:
        values = normal(n)
        for density in DENSITIES:
            works = operators(values, density)
            names = ("exact", "torch.topk", "np.argpartition")
            turns = rounds if n <= 2**20 else min(rounds, 9)
            seconds = times_of({name: works[name] for name in names}, turns)
            worst = max(ratio(seconds, "exact", other) for other in names[1:])
            found[f"{count(n)} elements, density {density:g}"] = worst
    return found


def main() -> None:
    """Times the selectors and prints the figures."""
    quick: bool = options(__doc__).parse_args().quick
    torch.set_num_threads(1)
    n, rounds = (N // 16, 3) if quick else (N, 11)
    values = normal(n)
    figures: list[Figure] = []
    ratios: dict[str, float] = {}
    rows: list[list[str]] = []
    for density in DENSITIES:
        found, more, row = compare(values, density, rounds)
        figures += found
        ratios |= more
        rows.append(row)
    for density in DENSITIES:
        exact, k = selector("exact"), k_of(density, n)
        kinds = {"normal": values} | odd_data(values)
        works = {kind: lambda data=data: exact.select(data, k) for kind, data in kinds.items()}  # noqa: B023
        seconds = times_of(works, rounds)
        for kind in list(kinds)[1:]:
            value = ratio(seconds, kind, "normal")
            ratios[f"{kind} / normal, density {density:g}"] = value
            figures.append(
                at_most(f"exact on {kind} / normal, density {density:g}", value, 2.0, " x", 2)
            )
    sizes = [2**power for power in ((16, 18) if quick else range(16, 25, 2))]
    calls = small_calls(sizes, 5 if quick else 41)
    figures += [
        at_most(f"exact / the faster of both, {what}", value, 1.0, " x", 3)
        for what, value in calls.items()
    ]
    names = list(operators(normal(64), 0.01))
    times = markdown_table(["density", *names], rows)
    finish("selection", figures, ratios | calls, quick=quick, elements=n, tables=[times])


if __name__ == "__main__":
    main()
