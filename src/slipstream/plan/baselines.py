"""The planners that look at sizes only: what stock data parallelism and the classics do.

Each takes gradients in the order in which they become ready and returns buckets in launch order.
Every dtype is a lane of its own, because a bucket has one dtype, and so are gradients that may be
sent sparsely; lanes are planned independently and their buckets launch in the order in which their
last gradients become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slipstream.errors import PlanError
from slipstream.plan.model import Bucket, Gradient, Plan, parameters_sha256
from slipstream.plan.sparsity import Sparsity

MIB = 2**20
Lane = list[Gradient]


def wfbp(lane: Lane) -> list[Lane]:
    """Wait-free backpropagation: one bucket per tensor (Poseidon, ATC'17)."""
    return [[gradient] for gradient in lane]


def single(lane: Lane) -> list[Lane]:
    """SyncEASGD's single message: everything in one bucket after backward."""
    return [lane]


def fixed(
    lane: Lane,
    first_bytes: int = MIB,
    cap_bytes: int = 25 * MIB,
    last_bytes: int | None = None,
) -> list[Lane]:
    """Buckets of at most `cap_bytes`; the first and the last have limits of their own.

    A gradient larger than its bucket's limit travels alone. The last bucket is what nothing can
    hide, so it is cut from the end: the longest tail of gradients within `last_bytes`.
    """
    tail: Lane = []
    if last_bytes is not None:
        room = last_bytes
        for gradient in reversed(lane):
            if gradient.bytes > room and tail:
                break
            tail.insert(0, gradient)
            room -= gradient.bytes
    buckets: list[Lane] = []
    open_bucket: Lane = []
    for gradient in lane[: len(lane) - len(tail)]:
        limit = cap_bytes if buckets else first_bytes
        if open_bucket and _bytes(open_bucket) + gradient.bytes > limit:
            buckets.append(open_bucket)
            open_bucket = []
        open_bucket.append(gradient)
    return [bucket for bucket in [*buckets, open_bucket, tail] if bucket]


def ddp(lane: Lane, first_bytes: int = MIB, cap_bytes: int = 25 * MIB) -> list[Lane]:
    """torch DDP's rule: a bucket closes as soon as it has reached its limit."""
    buckets: list[Lane] = [[]]
    for gradient in lane:
        buckets[-1].append(gradient)
        limit = first_bytes if len(buckets) == 1 else cap_bytes
        if _bytes(buckets[-1]) >= limit:
            buckets.append([])
    return [bucket for bucket in buckets if bucket]


PLANNERS: dict[str, Callable[..., list[Lane]]] = {
    "wfbp": wfbp,
    "single": single,
    "fixed": fixed,
    "ddp": ddp,
}


def plan_buckets(
    planner: str,
    gradients: Sequence[Gradient],
    /,
    *,
    sparsity: Sparsity | None = None,
    **options: Any,
) -> Plan:
    """A plan by the named planner.

    gradients: in the order in which they become ready; options: the planner's own, such as
    `cap_bytes`. sparsity: what it allows is sent sparsely, in buckets of their own. Raises
    PlanError for an unknown planner, an option it lacks, or a limit below 1.
    """
    if planner not in PLANNERS:
        known = ", ".join(PLANNERS)
        raise PlanError(f"There is no planner {planner!r}; there are {known}.")
    cut = PLANNERS[planner]
    known_options = cut.__code__.co_varnames[1 : cut.__code__.co_argcount]
    for option in options:
        if option not in known_options:
            takes = ", ".join(known_options) or "no options"
            raise PlanError(f"Planner {planner!r} has no option {option!r}; it takes {takes}.")
    for option, limit in options.items():
        is_whole = isinstance(limit, int) and not isinstance(limit, bool)
        if limit is not None and not (is_whole and limit >= 1):
            raise PlanError(f"{option} is {limit}; a bucket's limit is 1 byte or more, in digits.")
    buckets = [
        (bucket, sparse)
        for (_, sparse), lane in _lanes(gradients, sparsity).items()
        for bucket in cut(lane, **options)
    ]
    position = {gradient.name: index for index, gradient in enumerate(gradients)}
    buckets.sort(key=lambda bucket: max(position[gradient.name] for gradient in bucket[0]))
    return Plan(
        planner=planner,
        parameters_sha256=parameters_sha256(gradients),
        reduce=tuple(
            Bucket(
                gradients=tuple(g.name for g in bucket),
                bytes=_bytes(bucket),
                collective=sparse.collective if sparse else "native",
                wire=sparse.wire if sparse else "float32",
            )
            for bucket, sparse in buckets
        ),
    )


def _lanes(
    gradients: Sequence[Gradient], sparsity: Sparsity | None
) -> dict[tuple[str, Sparsity | None], Lane]:
    """By dtype, and by whether they are sent sparsely."""
    lanes: dict[tuple[str, Sparsity | None], Lane] = {}
    for gradient in gradients:
        sparse = sparsity if sparsity is not None and sparsity.allows(gradient) else None
        lanes.setdefault((gradient.dtype, sparse), []).append(gradient)
    return lanes


def _bytes(bucket: Iterable[Gradient]) -> int:
    return sum(gradient.bytes for gradient in bucket)
