"""What is checked and agreed when a model is wrapped, before anything of it is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from slipstream.cluster import Cluster
from slipstream.comm.peers import Peers
from slipstream.errors import RanksDiffer, SlipstreamError, UnsupportedModel
from slipstream.plan import Gradient
from slipstream.sync.buffers import Strides, agreed_strides

Params = dict[str, nn.Parameter]
LONGEST_WAIT_SECONDS = 30 * 24 * 3600.0


def check_timeout(timeout_seconds: float) -> None:
    """Raises SlipstreamError for a limit that no backend can keep."""
    if not 0 < timeout_seconds <= LONGEST_WAIT_SECONDS:
        raise SlipstreamError(
            f"timeout_seconds is {timeout_seconds!r}; it is a number of seconds above 0 and up to "
            f"{LONGEST_WAIT_SECONDS:.0f} (30 days)."
        )


def check_group(group: object) -> None:
    """Raises SlipstreamError for what `new_group` returns to ranks that are no members."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise SlipstreamError(
            f"This rank is no member of the group that was passed ({group!r}); only its members "
            "take part."
        )


def check_arguments(model: object, group: object, timeout_seconds: float, ignore: object) -> None:
    """Raises SlipstreamError for what cannot be meant, before anything is made."""
    if not isinstance(model, nn.Module):
        raise SlipstreamError(
            f"GradientSync takes a torch.nn.Module, and this is a {type(model).__name__}."
        )
    check_timeout(timeout_seconds)
    check_group(group)
    if isinstance(ignore, str):
        raise SlipstreamError(
            f"ignore is the text {ignore!r}; give a list of names, as in ignore=[{ignore!r}]."
        )


def cluster_of(cluster: Cluster | None, world_size: int) -> Cluster:
    """The cluster on which a group's ranks are: one node where nothing is said.

    Raises SlipstreamError for what is no Cluster, or one of another number of ranks.
    """
    if cluster is None:
        return Cluster((world_size,))
    if not isinstance(cluster, Cluster):
        raise SlipstreamError(
            f"cluster is {cluster!r}; give a slipstream.Cluster, as in Cluster((4, 4)) for two "
            "nodes of four ranks."
        )
    if cluster.world_size != world_size:
        raise SlipstreamError(
            f"The cluster has {cluster.world_size} ranks and the group {world_size}; they must be "
            "the same ranks."
        )
    return cluster


def collect_parameters(model: nn.Module, ignore: Collection[str]) -> Params:
    """The parameters that are averaged when trainable, each shared one once, by name.

    Raises UnsupportedModel for sharded parameters, and for names in `ignore` that do not exist.
    """
    every = dict(model.named_parameters())
    unknown = sorted(set(ignore) - set(every) - {name for name, _ in model.named_buffers()})
    if unknown:
        raise UnsupportedModel(f"ignore names {unknown[0]!r}, which the model does not have.")
    for name, param in every.items():
        if isinstance(param, DTensor):
            raise UnsupportedModel(
                f"Parameter {name!r} is a DTensor (FSDP or tensor parallel); Slipstream averages "
                "replicated parameters only. Wrap the model before sharding it, or do not shard it."
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UnsupportedModel(
                f"Parameter {name!r} of a lazy module has no shape yet; run one forward first."
            )
    kept = {name: param for name, param in every.items() if name not in ignore}
    devices = sorted({str(param.device) for param in kept.values()})
    if len(devices) > 1:
        raise UnsupportedModel(
            f"The model's parameters live on {' and '.join(devices)}; a rank trains on one device."
        )
    return kept


def device_of(params: Params) -> torch.device:
    """The device on which all parameters live; the CPU where there are none."""
    return next((param.device for param in params.values()), torch.device("cpu"))


def agree_on_model(params: Params, settings: Sequence[Any], peers: Peers) -> dict[str, Strides]:
    """Compares the ranks' models and settings; returns rank 0's strides by parameter name.

    Raises RanksDiffer, on every rank, that names the first difference.
    """
    mine = [
        [name, list(p.shape), _dtype_name(p), p.requires_grad, list(agreed_strides(p))]
        for name, p in params.items()
    ]
    everyone = peers.gather({"params": mine, "settings": list(settings)}, "comparing models")
    for rank, other in enumerate(everyone[1:], start=1):
        difference = _first_difference(everyone[0], other, rank)
        if difference:
            raise RanksDiffer(difference)
    return {row[0]: tuple(row[4]) for row in everyone[0]["params"]}


def gradients_in_reverse(params: Params) -> list[Gradient]:
    """The trainable parameters from the last registered to the first: backward's usual order."""
    trainable = [(name, p) for name, p in params.items() if p.requires_grad]
    return [Gradient(name, p.numel(), _dtype_name(p)) for name, p in reversed(trainable)]


def first_trainability_difference(
    mine: Sequence[str], theirs: Sequence[str], names: Sequence[str]
) -> str | None:
    """The first parameter, in registration order, that only one of two ranks trains."""
    different = set(mine) ^ set(theirs)
    return next((name for name in names if name in different), None)


def _first_difference(zero: dict[str, Any], other: dict[str, Any], rank: int) -> str | None:
    way_out = "Build the same model with the same settings on every rank."
    theirs = {row[0]: row for row in other["params"]}
    ours = {row[0]: row for row in zero["params"]}
    for having, lacking, holder, misser in ((ours, theirs, 0, rank), (theirs, ours, rank, 0)):
        for name in having:
            if name not in lacking:
                return (
                    f"Ranks differ: parameter {name!r} exists on rank {holder} and not on "
                    f"rank {misser}. {way_out}"
                )
    for position, row in enumerate(zero["params"]):
        name = row[0]
        if other["params"][position][0] != name:
            return (
                f"Ranks differ: parameter number {position} is {name!r} on rank 0 and "
                f"{other['params'][position][0]!r} on rank {rank}. {way_out}"
            )
        for field, what in ((1, "shape"), (2, "dtype"), (3, "trainable")):
            if theirs[name][field] != row[field]:
                return (
                    f"Ranks differ: {what} of parameter {name!r} is {row[field]} on rank 0 and "
                    f"{theirs[name][field]} on rank {rank}. {way_out}"
                )
    if zero["settings"] != other["settings"]:
        pairs = zip(zero["settings"], other["settings"], strict=True)
        ours_set, theirs_set = next(pair for pair in pairs if pair[0] != pair[1])
        return (
            f"Ranks differ: GradientSync was made with {ours_set} on rank 0 and with {theirs_set} "
            f"on rank {rank}. {way_out}"
        )
    return None


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
