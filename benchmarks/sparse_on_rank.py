"""What one rank does for lab_sparse.py, started as every rank of a job: its ORDERS file.

Variants take turns in an order that all ranks shuffle alike. Before each repetition the gradient
is written anew, links' token buckets are drained and ranks meet; a repetition lasts as long as on
its slowest rank. Bytes are those of the node's own network card.
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

from collectives_on_rank import over_ranks, sent_bytes
from slipstream import Cluster
from slipstream.comm import Collective, Collectives
from slipstream.comm.sparse import TopK
from slipstream.wires import Density

NUM_GRADIENTS = 3
DRAIN_NUMEL = 2**18


def variants(orders: dict[str, Any]) -> dict[str, Collective]:
    """Collectives by what the table calls them; sparse ones with rows gathered in either way."""
    group = dist.group.WORLD
    assert group is not None
    cluster = Cluster(tuple(orders["ranks_per_node"]))
    dense = Collectives(group, cluster)
    found: dict[str, Collective] = {f"ring {w}": dense.get("ring", w) for w in orders["wires"]}
    for name in ("hitopk", "naive_topk", "a2a_topk"):
        for values in orders["wires"]:
            wire = Density(density=orders["density"], values=values)
            found[f"{name} {values}"] = TopK(name, group, cluster, orders["numel"], wire)
    for gather in ("dense", "sparse"):
        wire = Density(density=orders["density"], values="float32")
        found[f"hitopk float32, {gather} gather"] = TopK(
            "hitopk", group, cluster, orders["numel"], wire, gather=gather
        )
    return found


def measure(orders: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Seconds, seconds of selecting and bytes of every repetition, by variant."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradients = [torch.randn(orders["numel"], generator=generator) for _ in range(NUM_GRADIENTS)]
    flat, drain = torch.empty(orders["numel"]), torch.zeros(DRAIN_NUMEL)
    among = variants(orders)
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "selection_seconds": [], "sent_bytes": []} for name in among
    }
    for turn in range(orders["turns"] + 1):
        names = list(among)
        random.Random(turn).shuffle(names)
        for name in names:
            flat.copy_(gradients[turn % NUM_GRADIENTS])
            dist.all_reduce(drain)
            dist.barrier()
            before = sent_bytes()
            start = time.perf_counter()
            among[name].sum_(flat)
            took = time.perf_counter() - start
            dist.barrier()
            sent = sent_bytes() - before
            selecting = getattr(among[name], "selection_seconds", 0.0)
            values = over_ranks([took, selecting, sent], dist.ReduceOp.MAX)
            if turn:  # the first one touches new memory
                for kind, value in zip(found[name], values, strict=True):
                    found[name][kind].append(value)
    return found


def main() -> None:
    """Joins the job and measures; rank 0 writes the result."""
    orders = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = measure(orders)
        if dist.get_rank() == 0:
            Path(orders["result"]).write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
