"""Evaluation over ranks: each test sample counts exactly once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.data import ImageSet
from slipstream.train.distributed import Job
from slipstream.train.evaluate import Evaluation, evaluate
from training_runs import tiny_images


class Counting(nn.Module):
    """Logits from the images' own pixels; remembers how many images it saw, and in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.modes: set[bool] = set()

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        self.modes.add(self.training)
        return images.flatten(1)[:, :3]


def evaluate_on(world_size: int, images: ImageSet) -> list[tuple[Evaluation, Counting]]:
    def body(rank: Rank) -> tuple[Evaluation, Counting]:
        model = Counting()
        job = Job(rank.rank, Cluster((world_size,)), group=rank.group, store=rank.store)
        return evaluate(model, images, job, mean=(0.5,), std=(0.25,)), model

    return run_ranks(body, world_size)


@pytest.mark.parametrize("num_samples", [1, 3, 10, 601])
def test_the_result_does_not_depend_on_the_number_of_ranks(num_samples: int) -> None:
    images = tiny_images(num_samples)
    [(reference, _)] = evaluate_on(1, images)
    pixels = (images.images.float() / 255 - 0.5) / 0.25
    logits = pixels.flatten(1)[:, :3]
    assert reference.accuracy == pytest.approx(
        float((logits.argmax(1) == images.labels).double().mean())
    )
    assert reference.loss == pytest.approx(
        float(nn.functional.cross_entropy(logits, images.labels)), rel=1e-6
    )
    for world_size in (2, 3, 7):
        outcomes = evaluate_on(world_size, images)
        assert sum(model.seen for _, model in outcomes) == num_samples
        for result, model in outcomes:
            assert result.samples == num_samples
            assert result.accuracy == reference.accuracy
            assert result.loss == pytest.approx(reference.loss, rel=1e-6)
            assert model.modes <= {False}
            assert model.training


def test_evaluation_leaves_no_gradients_and_the_mode_as_it_was() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout()).eval()
    evaluate(model, tiny_images(5), Job(0, Cluster((1,))), mean=(0.5,), std=(0.25,))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
