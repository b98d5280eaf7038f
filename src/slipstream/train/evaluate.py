"""Evaluation over all ranks: every sample counts exactly once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.data import ImageSet, evaluation_batches
from slipstream.train.distributed import Job

_BATCH_SIZE = 250


@dataclass(frozen=True)
class Evaluation:
    """Mean loss (cross-entropy, no smoothing) and accuracy over `samples` images."""

    loss: float
    accuracy: float
    samples: int


def evaluate(
    model: nn.Module, images: ImageSet, job: Job, *, mean: Sequence[float], std: Sequence[float]
) -> Evaluation:
    """Evaluates `model` on all of `images`, each rank on its share; all ranks get the same result.

    Every rank calls it, with buffers that were synchronised before. The model is in training mode
    again afterwards if it was before. Sums are formed in 64 bits and reduced once.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=job.device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for pixels, labels in evaluation_batches(
                images,
                world_size=job.world_size,
                rank=job.rank,
                batch_size=_BATCH_SIZE,
                mean=mean,
                std=std,
            ):
                labels = labels.to(job.device)
                logits = model(pixels.to(job.device))
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(dim=1) == labels).sum()
                sums[2] += labels.numel()
    finally:
        model.train(was_training)
    loss, correct, samples = job.sum(sums.cpu(), "evaluating").tolist()
    return Evaluation(loss / samples, correct / samples, round(samples))
