"""What one rank does for lab_collectives.py, started as every rank of a job: its ORDERS file.

Every variant of a size takes its turn in an order that all ranks shuffle alike; a repetition lasts
as long as on its slowest rank. Bytes are those of the node's own network card, read by its first
rank before and after a turn.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slipstream import Cluster
from slipstream.comm import Collective, Collectives
from slipstream.comm.nodes import Torus
from slipstream.measure import probe_budgeted

WHOLE = "torus float32, in one piece"
FLOAT_BYTES = 4


def variants(cluster: Cluster, ways: list[list[str]]) -> dict[str, Collective]:
    """Collectives by what the table calls them."""
    group = dist.group.WORLD
    assert group is not None
    collectives = Collectives(group, cluster)
    found: dict[str, Collective] = {}
    for name, wire in ways:
        found[f"{name} {wire}"] = collectives.get(name, wire)  # type: ignore[arg-type]
    if "torus float32" in found:
        found[WHOLE] = Torus(group, cluster, chunk_bytes=2**40)
    return found


def sent_bytes() -> int:
    """What this node's cards have sent to other nodes so far."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    cards = (line.split(":") for line in lines)
    return sum(int(text.split()[8]) for name, text in cards if name.strip() != "lo")


def over_ranks(values: list[float], op: Any) -> list[float]:
    """Combined over all ranks, the same on each."""
    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared, op=op)
    found: list[float] = shared.tolist()
    return found


def measure_size(
    size: int, among: dict[str, Collective], turns: int, repetitions: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each repetition and bytes sent a node and repetition, by variant."""
    flat = torch.zeros(size // FLOAT_BYTES)
    seconds: dict[str, list[float]] = {name: [] for name in among}
    sent: dict[str, list[float]] = {name: [] for name in among}
    for collective in among.values():
        collective.sum_(flat)
    for turn in range(turns):
        names = list(among)
        random.Random(turn).shuffle(names)
        for name in names:
            among[name].sum_(flat)  # drains the links' token buckets
            dist.barrier()
            before, times = sent_bytes(), []
            for _ in range(repetitions):
                start = time.perf_counter()
                among[name].sum_(flat)
                times.append(time.perf_counter() - start)
            bytes_here = (sent_bytes() - before) / repetitions
            seconds[name] += over_ranks(times, dist.ReduceOp.MAX)
            sent[name] += over_ranks([bytes_here], dist.ReduceOp.MAX)
    return {name: {"seconds": seconds[name], "sent_bytes": sent[name]} for name in among}


def main() -> None:
    """Joins the job and measures what the orders say; rank 0 writes the result."""
    orders = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = Cluster(tuple(orders["ranks_per_node"]))
    found: dict[str, Any] = {}
    try:
        if orders["stage"] == "probe":
            assert dist.group.WORLD is not None
            spec = probe_budgeted(
                dist.group.WORLD,
                cluster,
                orders["sizes"],
                orders["seconds"],
                ways=[(name, wire) for name, wire in orders["ways"]],
            )
            found = json.loads(spec.to_json())
        else:
            among = variants(cluster, orders["ways"])
            for size in orders["sizes"]:
                repetitions = orders["repetitions"] if size <= 2**18 else 1
                found[str(size)] = measure_size(size, among, orders["turns"], repetitions)
                if dist.get_rank() == 0:
                    print(f"  {size} bytes", flush=True)
        if dist.get_rank() == 0:
            Path(orders["result"]).write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
