"""Dealing samples to ranks: cases 18 (equal steps), 40 (other ranks), S6 (few samples)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.data import EpochSampler, evaluation_indices
from slipstream.data.sampler import Remainder
from slipstream.errors import DataError


def samplers(
    num_samples: int, world_size: int, batch: int, **options: object
) -> list[EpochSampler]:
    settings = {"seed": 1, **options}
    return [
        EpochSampler(
            num_samples,
            world_size=world_size,
            rank=rank,
            global_batch_size=batch,
            **settings,  # type: ignore[arg-type]
        )
        for rank in range(world_size)
    ]


def seen_in_step(ranks: list[EpochSampler], epoch: int, step: int) -> list[int]:
    """Samples of a step over all ranks and micro-steps."""
    return [
        sample
        for micro_step in range(ranks[0].accumulation_steps)
        for sampler in ranks
        for sample in sampler.indices(epoch, step, micro_step).tolist()
    ]


@given(
    num_samples=st.integers(1, 200),
    world_size=st.integers(1, 9),
    accumulation_steps=st.integers(1, 3),
    local=st.integers(1, 5),
    epoch=st.integers(0, 5),
    remainder=st.sampled_from(["drop", "repeat"]),
)
@settings(deadline=None)
def test_an_epoch_covers_the_data_in_equal_steps(
    num_samples: int,
    world_size: int,
    accumulation_steps: int,
    local: int,
    epoch: int,
    remainder: Remainder,
) -> None:
    batch = world_size * accumulation_steps * local
    assume(num_samples >= world_size and (remainder == "repeat" or batch <= num_samples))
    ranks = samplers(
        num_samples, world_size, batch, accumulation_steps=accumulation_steps, remainder=remainder
    )
    steps = {sampler.steps_per_epoch for sampler in ranks}
    assert len(steps) == 1
    (num_steps,) = steps
    for sampler in ranks:
        for step in range(num_steps):
            for micro_step in range(accumulation_steps):
                indices = sampler.indices(epoch, step, micro_step)
                assert indices.dtype == torch.int64 and indices.shape == (local,)
    seen = [sample for step in range(num_steps) for sample in seen_in_step(ranks, epoch, step)]
    if remainder == "drop":
        assert len(set(seen)) == len(seen) == num_samples // batch * batch
    else:
        assert set(seen) == set(range(num_samples))
        assert len(seen) - num_samples < batch
        # Nobody is seen a third time before everybody was seen a second time.
        counts = torch.tensor(seen).bincount(minlength=num_samples)
        assert int(counts.max() - counts.min()) <= 1


def test_what_a_step_sees_does_not_depend_on_the_number_of_ranks() -> None:
    by_world = []
    for world_size, accumulation_steps in [(1, 1), (2, 1), (2, 3), (3, 2), (4, 1), (8, 3)]:
        ranks = samplers(100, world_size, 24, accumulation_steps=accumulation_steps)
        by_world.append([seen_in_step(ranks, 3, step) for step in range(4)])
    assert all(steps == by_world[0] for steps in by_world)


@pytest.mark.parametrize("new_world_size", [1, 2, 3, 8])
def test_after_a_resume_with_other_ranks_the_rest_is_seen_exactly_once(new_world_size: int) -> None:
    before = samplers(144, 4, 24)
    after = samplers(144, new_world_size, 24)
    seen = [sample for step in range(3) for sample in seen_in_step(before, 0, step)]
    seen += [sample for step in range(3, 6) for sample in seen_in_step(after, 0, step)]
    assert sorted(seen) == list(range(144))


@pytest.mark.parametrize("new_world_size", [3, 8])
def test_ranks_among_which_the_batch_cannot_be_divided_are_refused(new_world_size: int) -> None:
    samplers(24, 4, 4)
    with pytest.raises(DataError, match=rf"batch of 4 .* {new_world_size} ranks") as caught:
        samplers(24, new_world_size, 4)
    assert f"multiple of {new_world_size}" in str(caught.value)


@pytest.mark.parametrize("remainder", ["drop", "repeat"])
@pytest.mark.parametrize(("num_samples", "world_size"), [(3, 7), (3, 4), (1, 2)])
def test_more_ranks_than_samples_are_refused_on_every_rank(
    num_samples: int, world_size: int, remainder: Remainder
) -> None:
    for rank in range(world_size):
        with pytest.raises(DataError, match=f"{world_size} ranks but only {num_samples} samples"):
            EpochSampler(
                num_samples,
                world_size=world_size,
                rank=rank,
                global_batch_size=world_size,
                seed=0,
                remainder=remainder,
            )


def test_a_batch_larger_than_the_data_is_refused_or_repeats_by_rule() -> None:
    with pytest.raises(DataError, match="batch of 16 is larger than the 5 samples"):
        samplers(5, 2, 16)
    ranks = samplers(5, 2, 16, remainder="repeat")
    assert ranks[0].steps_per_epoch == 1
    counts = torch.tensor(seen_in_step(ranks, 0, 0)).bincount()
    assert sorted(counts.tolist()) == [3, 3, 3, 3, 4]


def test_epochs_seeds_and_dropped_samples_differ_but_a_rerun_does_not() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        ranks = samplers(50, 2, 16, seed=seed)
        return [sample for step in range(3) for sample in seen_in_step(ranks, epoch, step)]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(each) for each in orders}) == 9
    assert len({frozenset(each) for each in orders}) > 1
    assert orders == [order(seed, epoch) for seed in range(3) for epoch in range(3)]


def test_asking_for_epochs_in_turn_does_not_change_them() -> None:
    (sampler,) = samplers(40, 1, 8)
    first = sampler.indices(0, 0)
    assert not torch.equal(first, sampler.indices(1, 0))
    assert torch.equal(first, sampler.indices(0, 0))


@pytest.mark.parametrize("place", [(-1, 0, 0), (0, 5, 0), (0, -1, 0), (0, 0, 2), (0, 0, -1)])
def test_places_that_do_not_exist_are_refused(place: tuple[int, int, int]) -> None:
    (sampler,) = samplers(40, 1, 8, accumulation_steps=2)
    with pytest.raises(ValueError, match=r"negative|not in"):
        sampler.indices(*place)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="remainder must be"):
        samplers(8, 1, 4, remainder="pad")
    with pytest.raises(ValueError, match=r"rank 2 is not in \[0, 2\)"):
        EpochSampler(8, world_size=2, rank=2, global_batch_size=4, seed=0)
    with pytest.raises(DataError, match="0 samples"):
        samplers(0, 1, 4)
    with pytest.raises(DataError, match="cannot be divided"):
        samplers(8, 1, 0)


@given(num_samples=st.integers(1, 60), world_size=st.integers(1, 70))
@settings(deadline=None)
def test_evaluation_counts_each_sample_exactly_once(num_samples: int, world_size: int) -> None:
    shares = [evaluation_indices(num_samples, world_size, rank) for rank in range(world_size)]
    assert torch.cat(shares).tolist() == list(range(num_samples))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_evaluation_with_more_ranks_than_samples_leaves_some_without() -> None:
    sizes = [len(evaluation_indices(3, 7, rank)) for rank in range(7)]
    assert sum(sizes) == 3 and sizes.count(0) == 4
