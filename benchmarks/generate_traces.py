"""Generates the shipped traces, src/slipstream/traces/*.json, from the architectures.

Forward and backward run on the meta device (shapes without data) and count FLOPs; the times are

    backward    between one gradient and the next: proportional to the FLOPs, at least 10 us,
                scaled so that forward + backward is the given compute time
    forward     half of the backward; to the first use of each parameter proportional to the FLOPs,
                at least 5 us a parameter
    input, update   0: nobody published them; every tensor is float32

Order of gradients: as autograd runs it. Compute times are published ones where there are any; each
trace's `note` says where its own comes from. With --check nothing is written: exit code 1 if a
shipped trace differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torchvision import models

import trace_architectures as ours
from slipstream.trace import Trace, TraceGradient, parameters_sha256

FOLDER = Path(__file__).parents[1] / "src" / "slipstream" / "traces"
FLOOR_SECONDS = 10e-6
IMAGES, TOKENS = (3, 224, 224), (64,)


@dataclass(frozen=True)
class Architecture:
    """What a trace is made from. sample: the shape of one; compute_seconds: forward + backward."""

    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch_size: int
    compute_seconds: float
    source: str


def _assumed(seconds: float, why: str) -> tuple[float, str]:
    return seconds, f"none is published for this model; {seconds:g} s is {why}."


TPDS = "{} s, one GPU, float32: breakdown arrays in the plotting script of the TPDS'21 authors."
ARCHITECTURES: dict[str, Architecture] = {
    "alexnet": Architecture(
        models.alexnet,
        IMAGES,
        128,
        *_assumed(0.0672, "what its FLOPs take at the rate assumed for VGG-16"),
    ),
    "bert_base": Architecture(
        ours.BertBase,
        TOKENS,
        64,
        0.305,
        "0.305 s: arrays in the plotting script of the INFOCOM'21 authors (ASC-WFBP). The batch of "
        "64 is that of the same group's survey, 64 tokens a sample are our choice.",
    ),
    "densenet201": Architecture(models.densenet201, IMAGES, 64, 0.361, TPDS.format(0.361)),
    "googlenet": Architecture(
        lambda: models.googlenet(aux_logits=True, init_weights=False),
        IMAGES,
        64,
        64 / 81.68,
        "64 images at 81.68 images/s a GPU (K80, one node: B-Caffe's simulator script). The model "
        "is torchvision's, with batch norm and both auxiliary heads.",
    ),
    "inception_v4": Architecture(ours.InceptionV4, (3, 299, 299), 128, 0.611, TPDS.format(0.611)),
    "resnet50": Architecture(
        models.resnet50,
        IMAGES,
        64,
        64 / 253.1,
        "64 images at 253.1 images/s (one V100-PCIE-32GB: ddl-benchmarks, 2020).",
    ),
    "resnet152": Architecture(models.resnet152, IMAGES, 128, 0.883, TPDS.format(0.883)),
    "transformer": Architecture(
        ours.Transformer,
        TOKENS,
        64,
        *_assumed(0.178, "what its FLOPs take at the rate of the BERT-Base trace"),
    ),
    "vgg16": Architecture(
        models.vgg16,
        IMAGES,
        32,
        *_assumed(0.375, "our assumption (half of a V100's peak rate)"),
    ),
    "vgg19": Architecture(
        models.vgg19,
        IMAGES,
        32,
        *_assumed(0.476, "what its FLOPs take at the rate assumed for VGG-16"),
    ),
}


class Recorder(TorchDispatchMode):
    """Counts FLOPs as operations run, and notes which parameters they read.

    flops: so far; first_use: of each parameter read, the FLOPs before it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.flops = 0
        self.first_use: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for argument in args:
            name = self._names.get(id(argument))
            if name is not None:
                self.first_use.setdefault(name, self.flops)
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def _outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [out for out in result if out is not None]


def record(architecture: Architecture) -> tuple[nn.Module, Recorder, int, dict[str, int]]:
    """Runs a step on the meta device.

    Returns the model, the recorder, the FLOPs of the forward, and those of the backward when each
    gradient became ready, in that order.
    """
    with torch.device("meta"):
        model = architecture.build().train()
        shape = (architecture.batch_size, *architecture.sample)
        batch = torch.zeros(shape, dtype=torch.int64 if len(shape) == 2 else torch.float32)
    ready: dict[str, int] = {}
    with Recorder(model) as recorder:
        outputs = _outputs(model(batch))
        forward_flops = recorder.flops
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: ready.update({name: recorder.flops - forward_flops})
            )
        torch.autograd.backward([out.sum() for out in outputs])
    return model, recorder, forward_flops, ready


def durations(flops: Sequence[int], floors: Sequence[float], total: float) -> list[float]:
    """max(floor, c * FLOPs) each, with the c for which they add up to `total` seconds."""
    low, high = 0.0, total / max(flops)
    for _ in range(200):
        middle = (low + high) / 2
        spent = sum(max(f, middle * n) for n, f in zip(flops, floors, strict=True))
        low, high = (middle, high) if spent < total else (low, middle)
    return [max(floor, low * n) for n, floor in zip(flops, floors, strict=True)]


def needed(recorder: Recorder, forward_flops: int, forward_seconds: float) -> dict[str, float]:
    """When the forward first reads each parameter, seconds from its start."""
    uses = sorted(set(recorder.first_use.values()))
    readers = [[n for n, use in recorder.first_use.items() if use == at] for at in uses]
    flops = [after - before for before, after in pairwise([*uses, forward_flops])]
    floors = [len(names) * FLOOR_SECONDS / 2 for names in readers]
    now, found = 0.0, {}
    for names, takes in zip(readers, durations(flops, floors, forward_seconds), strict=True):
        found.update(dict.fromkeys(names, round(now, 9)))
        now += takes
    return found


def generate(name: str, compute_seconds: float | None = None) -> Trace:
    """The trace of one architecture, for a compute time other than its own if that is given."""
    architecture = ARCHITECTURES[name]
    compute = compute_seconds or architecture.compute_seconds
    model, recorder, forward_flops, ready = record(architecture)
    parameters = dict(model.named_parameters())
    if set(ready) != set(parameters):
        raise RuntimeError(f"{name}: no gradient came for {sorted(set(parameters) - set(ready))}.")
    flops = [after - before for before, after in pairwise([0, *ready.values()])]
    takes = durations(flops, [FLOOR_SECONDS] * len(flops), compute * 2 / 3)
    first_needed = needed(recorder, forward_flops, compute / 3)
    now, gradients = 0.0, []
    for parameter, seconds in zip(ready, takes, strict=True):
        now += seconds
        gradients.append(
            TraceGradient(
                name=parameter,
                numel=parameters[parameter].numel(),
                ready_seconds=round(now, 9),
                needed_seconds=first_needed[parameter],
            )
        )
    return Trace(
        model=name,
        parameters_sha256=parameters_sha256(gradients),
        batch_size=architecture.batch_size,
        input_seconds=0.0,
        forward_seconds=round(compute / 3, 9),
        update_seconds=0.0,
        note="Generated from the architecture: times in proportion to FLOPs, at least 10 us a "
        "gradient; forward = backward / 2; input and update not included. Compute time: "
        + architecture.source,
        gradients=tuple(gradients),
    )


def as_text(trace: Trace) -> str:
    """The trace as JSON with one line a gradient."""
    document = json.loads(trace.model_dump_json(exclude_none=True))
    lines = [json.dumps(gradient) for gradient in document.pop("gradients")]
    head = json.dumps(document, indent=1).removesuffix("\n}")
    return f'{head},\n "gradients": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def main() -> int:
    """Writes the traces, or with --check compares them; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    arguments = parser.parse_args()
    differing = 0
    for name in arguments.only:
        trace, path = generate(name), FOLDER / f"{name}.json"
        text = as_text(trace)
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            differing += 1
            print(f"{path.name} differs from what its architecture gives", file=sys.stderr)
        numel = sum(gradient.numel for gradient in trace.gradients)
        print(f"{name}: {len(trace.gradients)} tensors, {numel:,} parameters, {len(text):,} B")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
