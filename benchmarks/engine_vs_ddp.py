"""Slipstream's engine against torch DDP: one step, same buckets, no slow link.

Two cases, each with 4 ranks (real processes on this machine, one thread each, Gloo):
  resnet18   torchvision's ResNet-18 on 64x64 images, real compute
  sleeping   the 161 tensors of ResNet-50 at a quarter of their size, compute replaced by sleep

DDP runs with gradient_as_bucket_view=True and forward_sync_buffers=False (the newer name of
broadcast_buffers=False), with and without batched_grad_copy; the faster of the two is the
baseline. Buckets: DDP's default caps for resnet18, a quarter of them for the scaled list. The
engine gets a Plan made of the buckets that DDP arrived at after its rebuild. A step is zero_grad
(to None, the default), forward, loss and backward, after which p.grad holds the average; the
optimizer, the same for both, is left out. After the warm-up the variants take turns, each turn in
another order; a step lasts as long as its slowest rank. A pair is one turn.

"engine, at once" is no product: the same engine with each bucket handed to Gloo as soon as it is
full, two under way at a time as with DDP, where the engine sends strictly one after the other so
that a small bucket cannot overtake the one that the plan puts before it. It tells how much of the
difference that rule is; the processors' time of all ranks in a step tells how much is work.

Memory: bytes that wrapping and three steps took from torch's allocator and that are still held
after backward, compared exactly; against DDP as above, and against DDP with
find_unused_parameters=True, which tells unused parameters apart as the engine always does.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from harness import Figure, at_most, finish, options, paired_ratio
from rank_processes import run_processes
from sleeping import SleepingModel, resnet50_sizes
from slipstream import Bucket, GradientSync, Plan
from slipstream.sync.channel import Begin, ThreadChannel
from slipstream.sync.reducer import Reducer
from slipstream.sync.tickets import BegunTicket, Operation, Ticket

CASES = ("resnet18", "sleeping")
SCALE = 0.25
DDP_VARIANTS = {"ddp": False, "ddp, batched copy": True}
DDP_WITH_UNUSED = "ddp, find_unused_parameters"
ENGINE = "engine"
AT_ONCE = "engine, at once"

Step = Callable[[], None]


def build_case(
    case: str, rank: int, batch_size: int
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A new model of the case, equal on every rank, and what computes its loss on this rank."""
    torch.manual_seed(0)
    if case == "resnet18":
        from torchvision.models import resnet18

        model = resnet18()
        torch.manual_seed(rank)
        images = torch.randn(batch_size, 3, 64, 64)
        labels = torch.randint(0, 1000, (batch_size,))
        return model, lambda module: cross_entropy(module(images), labels)
    one = torch.ones(())
    sleeping = SleepingModel(resnet50_sizes(SCALE), forward_seconds=0.05, backward_seconds=0.1)
    return sleeping, lambda module: module(one)


def wrap_ddp(
    model: nn.Module, case: str, batched_grad_copy: bool, *, find_unused_parameters: bool = False
) -> DistributedDataParallel:
    """DDP at its best settings for this case."""
    return DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        batched_grad_copy=batched_grad_copy,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=25 * SCALE if case == "sleeping" else None,
    )


def plan_of_ddp(ddp: DistributedDataParallel, num_ranks: int) -> Plan:
    """The buckets that DDP arrived at after its rebuild, as a Plan, in DDP's launch order."""
    data = ddp._get_ddp_logging_data()
    if not data.get("has_rebuilt_buckets"):
        raise RuntimeError("DDP has not rebuilt its buckets yet; run more warm-up steps.")
    parameters = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad]
    buckets = []
    for text in data["rebuilt_per_bucket_param_indices"].split(","):
        members = [parameters[int(index)] for index in text.split()]
        size = sum(parameter.nbytes for _, parameter in members)
        buckets.append(Bucket(gradients=tuple(name for name, _ in members), bytes=size))
    sizes = [int(size) for size in data["rebuilt_bucket_sizes"].split(",")]
    if [bucket.bytes for bucket in buckets] != sizes:
        raise RuntimeError(f"DDP reports bucket sizes {sizes}, but its buckets hold {buckets}.")
    return Plan(planner="ddp", nodes=1, ranks_per_node=num_ranks, reduce=tuple(buckets))


def held_bytes(wrap: Callable[[], Step], num_steps: int) -> tuple[Step, int]:
    """The step that `wrap` makes, and the bytes that wrapping and stepping took and still hold.

    Counted from the allocator's own events, so tensors that only C++ knows count too. What a
    backend's thread frees is not seen, so now and then too much is counted and never too little:
    the least of the ranks' counts, which are equal otherwise, is taken.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = wrap()
        for _ in range(num_steps):
            step()
    profiler = recorded.profiler
    assert profiler is not None and profiler.kineto_results is not None
    events = profiler.kineto_results.events()
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    least = torch.tensor(held, dtype=torch.int64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return step, int(least)


def step_of(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Step:
    """One step: after it `p.grad` holds the averages."""

    def step() -> None:
        module.zero_grad()
        loss(module).backward()

    return step


class AtOnce(ThreadChannel):
    """Hands everything to the backend at once: Gloo works on two, in whatever order they end."""

    def submit(self, operation: Operation, begin: Begin | None = None) -> Ticket | BegunTicket:
        """Begins the operation, whatever is under way."""
        assert begin is not None
        start_seconds = time.perf_counter()
        work = begin()
        assert work is not None
        return BegunTicket(work, start_seconds)


class Contest:
    """The variants of one case on this rank: builds them, lets them take turns, keeps times."""

    def __init__(self, case: str, rank: int, num_ranks: int, settings: dict[str, Any]) -> None:
        self.case, self.rank, self.num_ranks, self.settings = case, rank, num_ranks, settings
        self.steps: dict[str, Step] = {}
        self.gradient_bytes: dict[str, int] = {}
        self.plan: Plan | None = None
        self.engines: list[GradientSync] = []
        for name, batched in DDP_VARIANTS.items():
            self._add_ddp(name, batched)
        self._add_engine(ENGINE)
        self._add_engine(AT_ONCE)
        self._weigh_ddp_with_unused()

    def _add_ddp(self, name: str, batched_grad_copy: bool) -> None:
        model, loss = build_case(self.case, self.rank, self.settings["batch_size"])

        def wrap() -> Step:
            self.ddp = wrap_ddp(model, self.case, batched_grad_copy)
            return step_of(self.ddp, loss)

        self._enter(name, wrap)
        if self.plan is None:
            self.plan = plan_of_ddp(self.ddp, self.num_ranks)

    def _weigh_ddp_with_unused(self) -> None:
        """What DDP holds when it looks for unused parameters, as the engine always does."""
        model, loss = build_case(self.case, self.rank, self.settings["batch_size"])

        def wrap() -> Step:
            ddp = wrap_ddp(model, self.case, False, find_unused_parameters=True)
            return step_of(ddp, loss)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            _, self.gradient_bytes[DDP_WITH_UNUSED] = held_bytes(wrap, 3)

    def _add_engine(self, name: str) -> None:
        model, loss = build_case(self.case, self.rank, self.settings["batch_size"])
        assert self.plan is not None
        plan = self.plan

        def wrap() -> Step:
            sync = GradientSync(model, plan=plan)
            self.engines.append(sync)
            if name == AT_ONCE:
                reducer = sync._rounds.reducer
                assert isinstance(reducer, Reducer)
                reducer._channel = AtOnce()
            return step_of(model, loss)

        self._enter(name, wrap)

    def _enter(self, name: str, wrap: Callable[[], Step]) -> None:
        """Notes what memory a variant's gradients take, and warms it up."""
        step, self.gradient_bytes[name] = held_bytes(wrap, 3)
        for _ in range(self.settings["num_warmup_steps"]):
            step()
        self.steps[name] = step

    def run(self) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """By variant, for every turn's step: seconds of the slowest rank, and all processors'."""
        names = list(self.steps)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        work: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.settings["num_pairs"]):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                dist.barrier()
                start, busy = time.perf_counter(), time.process_time()
                self.steps[name]()
                seconds[name].append(time.perf_counter() - start)
                work[name].append(time.process_time() - busy)
        slowest = torch.tensor([seconds[name] for name in names], dtype=torch.float64)
        together = torch.tensor([work[name] for name in names], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(together)
        return (
            dict(zip(names, slowest.tolist(), strict=True)),
            dict(zip(names, together.tolist(), strict=True)),
        )

    def close(self) -> None:
        """Takes the engines off their models."""
        for sync in self.engines:
            sync.close()


def measure(rank: int, num_ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What one rank does: every case in turn."""
    results = {}
    for case in settings["cases"]:
        contest = Contest(case, rank, num_ranks, settings)
        assert contest.plan is not None
        seconds, work = contest.run()
        results[case] = {
            "seconds": seconds,
            "work_seconds": work,
            "gradient_bytes": contest.gradient_bytes,
            "bucket_bytes": [bucket.bytes for bucket in contest.plan.reduce],
        }
        contest.close()
    return results


def evaluate(case: str, result: dict[str, Any]) -> tuple[list[Figure], dict[str, float]]:
    """Figures and ratios of one case, against the faster variant of DDP."""
    seconds = result["seconds"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    baseline = min(DDP_VARIANTS, key=lambda name: medians[name])
    ratio = paired_ratio(seconds[ENGINE], seconds[baseline])
    at_once = paired_ratio(seconds[AT_ONCE], seconds[baseline])
    steps = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in medians.items())
    work = ", ".join(
        f"{name} {statistics.median(values) * 1e3:.0f} ms"
        for name, values in result["work_seconds"].items()
    )
    buckets = ", ".join(f"{size / 2**20:.1f}" for size in result["bucket_bytes"])
    versus = f"{case}: engine / {baseline}"
    held = result["gradient_bytes"]
    memory = [
        Figure(
            f"{case}: memory held after backward, engine / {other}",
            f"{held[ENGINE] / held[other]:.6f} ({held[ENGINE]:,} / {held[other]:,} bytes)",
            "no more bytes",
            held[ENGINE] <= held[other],
        )
        for other in (baseline, DDP_WITH_UNUSED)
    ]
    figures = [
        Figure(f"{case}: median step", f"{steps} (buckets of {buckets} MiB)"),
        at_most(f"{versus}, median of {ratio.num_pairs} pairs", ratio.median, 1.01),
        at_most(f"{versus}, upper end of the interval", ratio.upper, 1.03),
        Figure(f"{versus}, lower end of the interval", f"{ratio.lower:.3f}"),
        Figure(f"{case}: processors' time in a step, all ranks", work),
        Figure(
            f"{case}: engine, at once / {baseline}",
            f"{at_once.median:.3f} [{at_once.lower:.3f}, {at_once.upper:.3f}]",
        ),
        *memory,
    ]
    ratios = {
        f"{case}_median": ratio.median,
        f"{case}_lower": ratio.lower,
        f"{case}_upper": ratio.upper,
        f"{case}_at_once": at_once.median,
        f"{case}_memory": held[ENGINE] / held[baseline],
        f"{case}_memory_with_unused": held[ENGINE] / held[DDP_WITH_UNUSED],
    }
    return figures, ratios


def main() -> None:
    """Runs the cases and prints the figures."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--pairs", type=int, default=None, help="turns a case (default 60, quick 6)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=None, help="images a rank (default 8, quick 2)"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments: argparse.Namespace = parser.parse_args()
    quick: bool = arguments.quick
    settings = {
        "cases": arguments.cases,
        "num_pairs": arguments.pairs or (6 if quick else 60),
        "batch_size": arguments.batch_size or (2 if quick else 8),
        "num_warmup_steps": 3 if quick else 8,
    }
    results = run_processes(measure, arguments.ranks, settings)
    figures: list[Figure] = []
    ratios: dict[str, float] = {}
    for case, result in results.items():
        case_figures, case_ratios = evaluate(case, result)
        figures += case_figures
        ratios |= case_ratios
    finish("engine_vs_ddp", figures, ratios, quick=quick, ranks=arguments.ranks, settings=settings)


if __name__ == "__main__":
    main()
