"""From a recipe to the parts of a run."""

from __future__ import annotations

import pytest

from slipstream.optim.schedules import Schedule
from slipstream.train.build import build_schedule
from slipstream.train.recipe import load_recipe

STEPS_PER_EPOCH = 22


def schedule_of(*overrides: str, steps_per_epoch: int = STEPS_PER_EPOCH) -> Schedule:
    return build_schedule(load_recipe("digits", overrides), steps_per_epoch)


@pytest.mark.parametrize("recipe", ["digits", "fashion"])
def test_shipped_recipes_warm_up_for_one_epoch_as_they_say(recipe: str) -> None:
    assert build_schedule(load_recipe(recipe), STEPS_PER_EPOCH).warmup_updates == STEPS_PER_EPOCH


@pytest.mark.parametrize(
    ("epochs", "steps_per_epoch", "warmup"), [(2, 22, 22), (1, 22, 11), (1, 5, 2), (1, 1, 0)]
)
def test_a_warm_up_takes_at_most_half_of_a_short_run(
    epochs: int, steps_per_epoch: int, warmup: int
) -> None:
    schedule = schedule_of(f"train.epochs={epochs}", steps_per_epoch=steps_per_epoch)
    rates = [schedule.rate(update) for update in range(epochs * steps_per_epoch)]
    assert schedule.warmup_updates == warmup
    assert max(rates) == schedule.peak == rates[max(0, warmup - 1)]
