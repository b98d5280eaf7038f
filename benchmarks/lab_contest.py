"""What one rank does in the lab: the earlier run (costs, traces), then the measuring run (rows).

Started by lab_plans.py as every rank of a job: lab_contest.py ORDERS, a JSON file.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lab_variants as variants
from lab_rows import AUTO, DDP_OUR_SIZES, MIB, Row, RunFolder
from lab_variants import Variant, Workload
from slipstream import Cluster, Plan
from slipstream.costs import Costs
from slipstream.measure import OPERATIONS, probe_budgeted, profile
from slipstream.plan import plan_step, time_step
from slipstream.trace import Trace

SMALLEST_PROBED_BYTES = 1024
PROBE_SECONDS, PROBE_TIMES = 4.0, 12
"""A probe takes some seconds, and as many large all-reduces as its sweeps need."""
PLANNER_OPTIONS: dict[str, dict[str, Any]] = {"fixed": {"first_bytes": MIB, "cap_bytes": 5 * MIB}}
"""Planners that need more than trace and costs; the others run as they are."""


@dataclass(frozen=True)
class Orders:
    """stage: "earlier" or "measure"; see `lab_plans.py` for the settings."""

    stage: str
    folder: str
    rows: list[Row]
    settings: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> Orders:
        """Reads what the driver wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row.of(row) for row in fields.pop("rows")]
        return cls(rows=rows, **fields)


def say(text: str) -> None:
    """Progress, from rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def largest_over_ranks(values: list[float]) -> list[float]:
    """Each value's maximum over the ranks, the same on all of them."""
    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    found: list[float] = shared.tolist()
    return found


class Busy:
    """How much of all processors' time something takes, by any program or the kernel itself."""

    def __init__(self) -> None:
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[int, int]:
        """Ticks since the machine's start: idle or waiting for a disk, and in all."""
        text = Path("/proc/stat").read_text(encoding="ascii")
        ticks = [int(field) for field in text.split("\n", 1)[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    def share(self) -> float:
        """Since this was made: 0 to 1."""
        idle, total = (now - then for now, then in zip(self._now(), self._began, strict=True))
        return 1 - idle / total if total else 0.0


class EarlierRun:
    """Measures what the plans and the predictions of some rows are made from."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.folder = RunFolder(Path(orders.folder))

    def run(self) -> None:
        """Probes the cluster once, and profiles every row's step without communication."""
        traces = {row: self.profile(row) for row in self.orders.rows}
        first = self.orders.rows[0]
        total_bytes = max(trace.bytes for trace in traces.values())
        gathers = any("pipelined" in row.planners for row in self.orders.rows)
        seconds = PROBE_SECONDS + PROBE_TIMES * 2 * 8 * total_bytes / first.bits_per_second
        seconds *= 2 if gathers else 1  # the halves together take as long
        seconds *= 0.3 if self.orders.settings["quick"] else 1
        say(f"probing for about {seconds:.0f} s")
        group = dist.group.WORLD
        assert group is not None
        spec = probe_budgeted(
            group,
            Cluster.regular(first.nodes, 1),
            _sizes_up_to(total_bytes),
            seconds,
            operations=OPERATIONS if gathers else ("all_reduce",),
        )
        if dist.get_rank() == 0:
            spec.save(self.folder.cluster(first.nodes, first.rate))

    def profile(self, row: Row) -> Trace:
        """The trace of a row, written by rank 0."""
        work = variants.workload(row, dist.get_rank())
        step = variants.step_of(work.model, variants.sgd(work.model), work.loss)
        trace = profile(work.model, step, name=row.workload, batch_size=1)
        if dist.get_rank() == 0:
            trace.save(self.folder.trace(row))
        return trace


class Contest:
    """The variants of one row on this rank: builds them, lets them take turns, keeps times."""

    def __init__(self, row: Row, folder: RunFolder, settings: dict[str, Any]) -> None:
        self.row, self.folder, self.settings = row, folder, settings
        spec, self.trace = folder.load_earlier_run(row)
        self.costs = Costs.of(spec)
        self.work: Workload = variants.workload(row, dist.get_rank())
        self.variants: dict[str, Variant] = {}
        self.same_as: dict[str, str] = {}
        for planner in row.planners:
            self._enter_planner(planner)
        if row.ddp_caps_mib:
            self._enter_auto()
            self._enter_ddp()

    def _model(self) -> torch.nn.Module:
        return self.work.again(variants.builder(self.row))

    def _enter_planner(self, planner: str) -> None:
        plan = plan_step(planner, self.trace, self.costs, **PLANNER_OPTIONS.get(planner, {}))
        twin = self._twin(plan, self.row.planners)
        if twin is None:
            self.variants[planner] = variants.engine(self._model(), self.work.loss, plan)
        else:
            self.same_as[planner] = twin

    def _enter_auto(self) -> None:
        self.variants[AUTO] = variants.auto(self._model(), self.work.loss, self.row.nodes)
        say(f"  {self.variants[AUTO].story}")

    def _enter_ddp(self) -> None:
        caps = variants.ddp_caps(self.row, self.trace.bytes)
        one_bucket = [n for n, cap in caps.items() if cap and cap * MIB > self.trace.bytes]
        self.same_as |= dict.fromkeys(one_bucket[1:], one_bucket[0]) if one_bucket else {}
        for name, cap in caps.items():
            if name not in self.same_as:
                self._keep(name, variants.ddp(self._model(), self.work.loss, cap), caps)
        our_sizes = variants.caps_of(self.variants[AUTO].plan)
        by_list = variants.ddp(self._model(), self.work.loss, cap_list_mib=our_sizes)
        self._keep(DDP_OUR_SIZES, by_list, caps)

    def _keep(self, name: str, variant: Variant, among: Mapping[str, object]) -> None:
        """DDP's buckets are known once it has run: a twin goes again."""
        twin = self._twin(variant.plan, among)
        if twin is None:
            self.variants[name] = variant
        else:
            self.same_as[name] = twin

    def _twin(self, plan: Plan, among: Mapping[str, object] | tuple[str, ...]) -> str | None:
        """The variant of the same kind whose buckets are the same."""
        for name, variant in self.variants.items():
            if name in among and variant.plan.fingerprint() == plan.fingerprint():
                return name
        return None

    def run(self) -> dict[str, Any]:
        """Turns in which every variant trains in another order; seconds a step, by variant.

        A step lasts as long as on the slowest rank.
        """
        self.busy: dict[str, list[float]] = {name: [] for name in self.variants}
        began = time.perf_counter()
        turns = [self._turn(0)]
        (cycle,) = largest_over_ranks([time.perf_counter() - began])
        fitting = int(self.settings["row_seconds"] / cycle)
        num_turns = max(self.settings["min_turns"], min(self.settings["max_turns"], fitting))
        say(f"  {len(self.variants)} variants, {num_turns} turns")
        turns += [self._turn(number) for number in range(1, num_turns)]
        names = list(self.variants)
        mine = [turn[name] for turn in turns for name in names]
        slowest = torch.tensor(largest_over_ranks(mine)).reshape(num_turns, len(names))
        seconds = {name: slowest[:, at].tolist() for at, name in enumerate(names)}
        return {"seconds": seconds, "run_seconds": time.perf_counter() - began}

    def _turn(self, number: int) -> dict[str, float]:
        """This rank's seconds a step, by variant; a block starts at a barrier."""
        names = list(self.variants)
        random.Random(number).shuffle(names)
        found = {}
        for name in names:
            variant = self.variants[name]
            dist.barrier()
            if self.row.settles or variant.plan.gather is not None:
                variant.run(1)
            busy, start = Busy(), time.perf_counter()
            variant.run(self.settings["steps"])
            found[name] = (time.perf_counter() - start) / self.settings["steps"]
            self.busy[name].append(busy.share())
            variant.rest()
        return found

    def document(self, measured: dict[str, Any]) -> dict[str, Any]:
        """What is kept of the row: measured and predicted, by variant."""
        total = self.costs.curve().seconds(self.trace.bytes)
        found = {}
        for name, variant in self.variants.items():
            found[name] = {
                "seconds": measured["seconds"][name],
                "busy": self.busy[name],
                "predicted_seconds": time_step(self.trace, self.costs, variant.plan).step_seconds,
                "bucket_bytes": [bucket.bytes for bucket in variant.plan.reduce],
                "gather_bytes": [bucket.bytes for bucket in variant.plan.gather or ()],
                "lower_bound_seconds": variant.plan.lower_bound_seconds,
                "story": variant.story,
            }
        return {
            "model": self.row.model,
            "rate": self.row.rate,
            "nodes": self.row.nodes,
            "computes": self.row.computes,
            "bytes": self.trace.bytes,
            "tensors": len(self.trace.gradients),
            "forward_seconds": self.trace.forward_seconds,
            "backward_seconds": self.trace.backward_seconds,
            "compute_seconds": self.trace.compute_seconds,
            "all_reduce_seconds": total,
            "run_seconds": measured["run_seconds"],
            "variants": found,
            "same_as": self.same_as,
        }

    def close(self) -> None:
        """Takes every engine off its model."""
        for variant in self.variants.values():
            variant.close()


def measure(orders: Orders) -> None:
    """The measuring run: every row, its file written as soon as it is done."""
    folder = RunFolder(Path(orders.folder))
    for row in orders.rows:
        say(f"{row.key}: building")
        contest = Contest(row, folder, orders.settings)
        measured = contest.run()
        document = contest.document(measured)
        if dist.get_rank() == 0:
            folder.write(folder.result(row), document)
        medians = {name: statistics.median(s) for name, s in measured["seconds"].items()}
        say("  " + ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in medians.items()))
        contest.close()
        dist.barrier()


def _sizes_up_to(total_bytes: int) -> list[int]:
    """1 KiB, 2 KiB, ... and as last the whole list."""
    sizes = [SMALLEST_PROBED_BYTES]
    while sizes[-1] * 2 < total_bytes:
        sizes.append(sizes[-1] * 2)
    return [*sizes, -(-total_bytes // 4) * 4]


def main() -> None:
    """Joins the job and does what the orders say."""
    orders = Orders.load(Path(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        EarlierRun(orders).run() if orders.stage == "earlier" else measure(orders)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
