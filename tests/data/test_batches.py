"""Batches: right content, ahead of time, the same after a resume and with any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.data import (
    Augment,
    Batch,
    Batches,
    EpochSampler,
    ImageSet,
    channel_statistics,
    evaluation_batches,
    normalise,
)
from slipstream.errors import DataError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def sampler(world_size: int = 1, rank: int = 0, **options: Any) -> EpochSampler:
    settings: dict[str, Any] = {"global_batch_size": 8, "seed": 3, **options}
    return EpochSampler(24, world_size=world_size, rank=rank, **settings)


def collect(
    image_set: ImageSet, dealer: EpochSampler, epoch: int = 0, **options: Any
) -> list[Batch]:
    arguments: dict[str, Any] = {"augment": Augment(1, True), "seed": 3, "mean": MEAN, "std": STD}
    with Batches(image_set, dealer, epoch, **{**arguments, **options}) as batches:
        return list(batches)


def test_batches_are_the_dealt_samples_augmented_and_normalised(image_set: ImageSet) -> None:
    dealer = sampler(2, 1, accumulation_steps=2)
    batches = collect(image_set, dealer, epoch=4)
    places = [(batch.step, batch.micro_step) for batch in batches]
    assert places == [(step, micro) for step in range(3) for micro in range(2)]
    for batch in batches:
        samples = dealer.indices(4, batch.step, batch.micro_step)
        images = Augment(1, True).apply(image_set.images[samples], samples, seed=3, epoch=4)
        assert torch.equal(batch.images, normalise(images, MEAN, STD))
        assert torch.equal(batch.labels, image_set.labels[samples])
        assert batch.epoch == 4
        assert batch.images.dtype == torch.float32 and batch.images.shape == (2, 3, 6, 5)
        assert batch.prepared_from <= batch.prepared_until


def test_without_augmentation_the_pixels_come_as_they_are(image_set: ImageSet) -> None:
    dealer = sampler()
    for batch in collect(image_set, dealer, augment=None):
        pixels = image_set.images[dealer.indices(0, batch.step)].double() / 255
        mean = torch.tensor(MEAN, dtype=torch.float64).reshape(-1, 1, 1)
        std = torch.tensor(STD, dtype=torch.float64).reshape(-1, 1, 1)
        torch.testing.assert_close(
            batch.images.double(), (pixels - mean) / std, rtol=1e-6, atol=1e-6
        )


def test_batches_belong_to_the_receiver_and_leave_the_set_alone(image_set: ImageSet) -> None:
    images, labels = image_set.images.clone(), image_set.labels.clone()
    with Batches(
        image_set, sampler(), 0, augment=None, seed=0, mean=MEAN, std=STD, depth=1
    ) as batches:
        for batch in batches:
            batch.images.zero_()
            batch.labels.zero_()
    assert torch.equal(image_set.images, images) and torch.equal(image_set.labels, labels)


def test_images_start_at_multiples_of_64_bytes(image_set: ImageSet) -> None:
    assert all(batch.images.data_ptr() % 64 == 0 for batch in collect(image_set, sampler()))


@pytest.mark.parametrize("start_step", [0, 1, 2, 3])
def test_a_later_start_gives_exactly_the_rest(image_set: ImageSet, start_step: int) -> None:
    dealer = sampler(accumulation_steps=2)
    whole = collect(image_set, dealer, epoch=1)
    rest = collect(image_set, dealer, epoch=1, start_step=start_step)
    assert len(rest) == 2 * (3 - start_step)
    for late, early in zip(rest, whole[2 * start_step :], strict=True):
        assert (late.step, late.micro_step) == (early.step, early.micro_step)
        assert torch.equal(late.images, early.images)
        assert torch.equal(late.labels, early.labels)


def test_ranks_together_see_what_one_rank_would_see(image_set: ImageSet) -> None:
    alone = collect(image_set, sampler())
    shares = [collect(image_set, sampler(4, rank)) for rank in range(4)]
    for step, whole in enumerate(alone):
        joined = torch.cat([share[step].images for share in shares])
        assert torch.equal(joined, whole.images)


def test_a_rerun_is_identical_and_epochs_and_ranks_differ(image_set: ImageSet) -> None:
    runs = [
        [collect(image_set, sampler(2, rank), epoch) for rank in range(2) for epoch in range(2)]
        for _ in range(2)
    ]
    for first, second in zip(*runs, strict=True):
        assert all(torch.equal(a.images, b.images) for a, b in zip(first, second, strict=True))
    streams = {first[0].images.numpy().tobytes() for first in runs[0]}
    assert len(streams) == 4


def test_the_next_epoch_may_be_prepared_beside_this_one(image_set: ImageSet) -> None:
    dealer = sampler()
    apart = [collect(image_set, dealer, epoch) for epoch in range(2)]
    arguments: dict[str, Any] = {"augment": Augment(1, True), "seed": 3, "mean": MEAN, "std": STD}
    with (
        Batches(image_set, dealer, 0, **arguments) as this,
        Batches(image_set, dealer, 1, **arguments) as following,
    ):
        for first, second, old, new in zip(this, following, *apart, strict=True):
            assert torch.equal(first.images, old.images)
            assert torch.equal(second.images, new.images)


def test_the_callers_random_state_and_threads_are_left_alone(image_set: ImageSet) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    collect(image_set, sampler())
    assert torch.equal(state, torch.get_rng_state())
    assert threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "one finite value for each of the 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, "std above 0"),
        ({"std": (0.5, float("nan"), 0.5)}, "one finite value"),
        ({"mean": (0.5, float("inf"), 0.5)}, "one finite value"),
        ({"augment": Augment(5)}, "crop_padding is 5 but the images are 6 x 5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    image_set: ImageSet, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        collect(image_set, sampler(), **options)


def test_a_sampler_of_other_data_is_refused(image_set: ImageSet) -> None:
    dealer = EpochSampler(25, world_size=1, rank=0, global_batch_size=5, seed=0)
    with pytest.raises(DataError, match="deals 25 samples, but 'coloured' has 24"):
        collect(image_set, dealer)


@pytest.mark.parametrize(("epoch", "start_step"), [(-1, 0), (0, 4), (0, -1)])
def test_places_that_do_not_exist_are_refused(
    image_set: ImageSet, epoch: int, start_step: int
) -> None:
    with pytest.raises(ValueError, match="an epoch has the steps 0 to 2"):
        collect(image_set, sampler(), epoch, start_step=start_step)


@pytest.mark.parametrize("world_size", [1, 2, 5, 30])
def test_evaluation_sees_each_image_once_over_all_ranks(
    image_set: ImageSet, world_size: int
) -> None:
    images, labels = [], []
    for rank in range(world_size):
        for share, share_labels in evaluation_batches(
            image_set, world_size=world_size, rank=rank, batch_size=7, mean=MEAN, std=STD
        ):
            assert 1 <= len(share) <= 7
            images.append(share)
            labels.append(share_labels)
    assert torch.equal(torch.cat(images), normalise(image_set.images, MEAN, STD))
    assert torch.equal(torch.cat(labels), image_set.labels)


def test_evaluation_refuses_an_empty_batch(image_set: ImageSet) -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        list(evaluation_batches(image_set, world_size=1, rank=0, batch_size=0, mean=MEAN, std=STD))


def test_normalising_by_the_sets_own_statistics_centres_it(image_set: ImageSet) -> None:
    images = normalise(image_set.images, *channel_statistics(image_set)).double()
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(images.mean((0, 2, 3)), zeros, rtol=0, atol=1e-6)
    torch.testing.assert_close(images.std((0, 2, 3), correction=0), ones, rtol=0, atol=1e-6)
