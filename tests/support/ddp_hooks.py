"""One training under torch's DDP, with its own all-reduce and with each of our hooks."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from slipstream import Cluster, DDPHookState, Sparsity, ddp_hook
from slipstream.wires import DENSE_WIRES, SPARSE_COLLECTIVES, DenseWire
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


def run_sparse(rank: int, _world_size: int) -> dict[str, Any]:
    """Sums over steps of what DDP makes of gradients that do not depend on weights."""
    results: dict[str, Any] = {"in full": _summed(rank, None)[0]}
    for name in SPARSE_COLLECTIVES:
        given, owed = _summed(rank, Sparsity(0.2, collective=name, small_numel=7))
        results |= {f"{name} given": given, f"{name} owed": owed}
    return results


def _summed(rank: int, sparsity: Sparsity | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What DDP gave out in some steps, and what this rank owes afterwards; both flat."""
    model = mlp().float()
    params = dict(model.named_parameters())
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    state = None
    if sparsity is not None:
        state = DDPHookState(sparsity=sparsity, model=ddp, cluster=CLUSTER, timeout_seconds=20.0)
        ddp.register_comm_hook(state, ddp_hook)
    total = torch.zeros(weights(model).numel())
    for step in range(5):
        ddp.zero_grad()
        loss_of(ddp, batch(rank, step).float()).backward()
        total += torch.cat([p.grad.flatten() for p in params.values() if p.grad is not None])
    owed = {name: torch.zeros(param.numel()) for name, param in params.items()}
    for key, values in (state.__getstate__()["residuals"] if state else {}).items():
        name, _, start = key.removesuffix("+").partition("@")
        owed[name][int(start) : int(start) + values.numel()] += values
    if state is not None:
        state.close()
    return total, torch.cat(list(owed.values()))


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
