"""Steps that differ: jitter, stragglers and an unsteady network, as percentiles of many steps.

Each step every rank draws how slow its computation is: exp(sigma z), z standard normal, whose
median is the trace; with a small probability it straggles and is slower by a factor on top. All
ranks begin a step together, and a bucket sets out when the slowest rank has its gradients, so only
the slowest rank's factor counts. It is drawn directly, from the distribution of a maximum: with F
the distribution of one rank, the maximum of n is F^-1(U^(1/n)), which costs the same for two ranks
as for thousands. Each bucket draws its own factor on the network.

A seed gives the same steps again; planners are compared under the same draws of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from slipstream.costs.curves import Floats
from slipstream.errors import SlipstreamError
from slipstream.plan import BucketTiming, Plan, StepTiming
from slipstream.plan.halves import forward_half
from slipstream.trace import Trace

MAX_SLOWDOWN = 1e6


@dataclass(frozen=True)
class Variation:
    """How much steps differ.

    compute_jitter: sigma of a rank's computation, about its relative standard deviation.
    straggler_share: probability that a rank straggles in a step; straggler_slowdown: the factor by
    which it is slower then. network_jitter: sigma of each bucket's time. num_steps: how many are
    drawn. Raises SlipstreamError where one of them makes no sense.
    """

    compute_jitter: float = 0.0
    straggler_share: float = 0.0
    straggler_slowdown: float = 2.0
    network_jitter: float = 0.0
    num_steps: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("compute_jitter", "network_jitter"):
            sigma = getattr(self, name)
            if not 0 <= sigma <= 2:
                raise SlipstreamError(f"{name} is {sigma}; it is a share, 0 to 2, such as 0.05.")
        if not 0 <= self.straggler_share <= 1:
            raise SlipstreamError(
                f"straggler_share is {self.straggler_share}; it is a probability, 0 to 1."
            )
        if not 1 <= self.straggler_slowdown <= MAX_SLOWDOWN:
            raise SlipstreamError(
                f"straggler_slowdown is {self.straggler_slowdown}; it is a factor of 1 to "
                f"{MAX_SLOWDOWN:,.0f}."
            )
        if not 1 <= self.num_steps <= 1_000_000:
            raise SlipstreamError(f"num_steps is {self.num_steps}; it is 1 to 1,000,000.")
        if self.seed < 0:
            raise SlipstreamError(f"seed is {self.seed}; it is 0 or more.")

    @property
    def varies(self) -> bool:
        """Whether steps differ at all."""
        return bool(self.compute_jitter or self.straggler_share or self.network_jitter)


@dataclass(frozen=True)
class Percentiles:
    """Of the drawn steps, in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, steps: Floats) -> Percentiles:
        """Of an array of step times, at least one."""
        p50, p95, p99 = np.quantile(steps, [0.5, 0.95, 0.99])
        return cls(float(steps.mean()), float(p50), float(p95), float(p99))


def slowest_ranks(variation: Variation, world_size: int) -> Floats:
    """The slowest rank's factor of each step, [num_steps]."""
    draws = np.random.default_rng([variation.seed, world_size])
    steps = variation.num_steps
    stragglers = draws.binomial(world_size, variation.straggler_share, steps)
    usual = _slowest(draws.random(steps), world_size - stragglers, variation.compute_jitter)
    late = _slowest(draws.random(steps), stragglers, variation.compute_jitter)
    return np.maximum(usual, variation.straggler_slowdown * late)


def draw_steps(
    trace: Trace, plan: Plan, timing: StepTiming, variation: Variation, world_size: int
) -> Floats:
    """The seconds of each drawn step, [num_steps]; timing: of the plan without variation.

    The recurrence of `plan.time_step`, for all steps at once; without variation they all equal its
    step. Raises TraceError where the plan gathers and the trace lacks needed_seconds.
    """
    slow = slowest_ranks(variation, world_size)
    network = _Network(variation, world_size)
    free = np.zeros(variation.num_steps)
    for bucket in timing.reduce:
        np.maximum(free, bucket.ready_seconds * slow, out=free)
        free += network.seconds(bucket)
    reduced = np.maximum(free, trace.backward_seconds * slow)
    if plan.gather is not None and timing.gather is not None:
        half = forward_half(trace)
        names = [gradient.name for gradient in half.gradients]
        before_end = dict(zip(names, half.ready_seconds, strict=True))
        forward, free = half.floor_seconds * slow, np.zeros(variation.num_steps)
        for members, bucket in zip(plan.gather, timing.gather, strict=True):
            free += network.seconds(bucket)
            rest = max(before_end[name] for name in members.gradients)
            np.maximum(forward, free + rest * slow, out=forward)
        return reduced + forward
    around = trace.forward_seconds + trace.update_seconds
    if plan.wait == "forward":
        hidden = trace.backward_seconds + trace.input_seconds
        return np.maximum(reduced, hidden * slow) + around * slow
    return reduced + (trace.input_seconds + around) * slow


class _Network:
    """Draws how long each bucket takes."""

    def __init__(self, variation: Variation, world_size: int) -> None:
        self._sigma, self._steps = variation.network_jitter, variation.num_steps
        self._draws = np.random.default_rng([variation.seed, world_size, 1])

    def seconds(self, bucket: BucketTiming) -> Floats | float:
        takes = bucket.end_seconds - bucket.start_seconds
        if self._sigma == 0:
            return takes
        drawn: Floats = takes * np.exp(self._sigma * self._draws.standard_normal(self._steps))
        return drawn


def _slowest(uniform: Floats, num_ranks: np.typing.NDArray[np.int64], sigma: float) -> Floats:
    """The largest of num_ranks draws of exp(sigma z), elementwise; 0 where there are none."""
    some = num_ranks > 0
    found = np.zeros(len(uniform))
    # 1 - U^(1/n) without cancellation: with many ranks it is tiny.
    above = -np.expm1(np.log1p(-uniform[some]) / num_ranks[some])
    above = np.clip(above, 1e-300, 1 - 2**-53)
    quantile = NormalDist().inv_cdf
    found[some] = np.exp(-sigma * np.array([quantile(share) for share in above.tolist()]))
    return found
