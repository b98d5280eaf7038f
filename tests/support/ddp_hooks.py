"""One training under torch's DDP, with its own all-reduce and with each of our hooks."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from slipstream import Cluster, DDPHookState, ddp_hook
from slipstream.wires import DENSE_WIRES, DenseWire
from small_models import batch, loss_of, mlp, weights

CLUSTER = Cluster((2, 2))
STEPS = 4


def trained(rank: int, state: DDPHookState | None) -> torch.Tensor:
    """The weights after some steps; saved and loaded between two of them where there is a hook."""
    model = mlp()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    if state is not None:
        ddp.register_comm_hook(state, ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, batch(rank, step)).backward()
        optimizer.step()
    return weights(model)


def run_all(rank: int, _world_size: int) -> dict[str, Any]:
    """Weights by collective and wire, and DDP's own under "torch"."""
    results: dict[str, Any] = {"torch": trained(rank, None)}
    for name, wires in DENSE_WIRES.items():
        for wire in wires:
            results[f"{name} {wire}"] = trained_with(rank, name, wire)
    results["failure"] = failure_of(rank)
    return results


def failure_of(rank: int) -> str:
    """What DDP raises where one rank's collective fails."""
    state = DDPHookState("ring", timeout_seconds=20.0)
    if rank == 1:
        assert state._collectives is not None

        def fail(flat: torch.Tensor, divisor: int = 1) -> None:
            raise ValueError("no memory for this bucket")

        state._collectives.get("ring").sum_ = fail  # type: ignore[method-assign]
    try:
        trained(rank, state)
    except RuntimeError as error:
        return str(error)
    finally:
        state.close()
    return "nothing"


def trained_with(rank: int, name: str, wire: DenseWire) -> torch.Tensor:
    state = DDPHookState(name, wire, cluster=CLUSTER, timeout_seconds=20.0)
    found = trained(rank, state)
    file = io.BytesIO()
    torch.save({"hook": state}, file)
    file.seek(0)
    loaded: DDPHookState = torch.load(file, weights_only=True)["hook"]
    state.close()
    assert (loaded.collective, loaded.wire, loaded.cluster) == (name, wire, CLUSTER)
    assert torch.equal(trained(rank, loaded), found), "a loaded state averages as before"
    loaded.close()
    return found
