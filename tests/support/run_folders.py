"""Run folders with checkpoints that nobody trained for."""

from pathlib import Path

import torch

from slipstream.train.checkpoint import CheckpointWriter, Position, TrainState
from slipstream.train.recipe import load_recipe, parse_recipe


def saved(run: Path, step: int = 7) -> Path:
    """A checkpoint in `run` with the recipe that lies there (else digits), as it stood at `step`.

    Its weights are of a model of two numbers.
    """
    file = run / "recipe.toml"
    text = file.read_text() if file.exists() else load_recipe("digits").to_toml()
    recipe = parse_recipe(text, "the recipe")
    model = torch.nn.Linear(1, 1)
    state = TrainState(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        position=Position(
            epoch=0,
            step_in_epoch=step,
            world_size=recipe.world_size,
            global_batch_size=recipe.train.global_batch_size,
            seed=recipe.train.seed,
        ),
        recipe=text,
    )
    with CheckpointWriter(run / "checkpoints") as writer:
        path = writer.save(state, step, block=True).path
    assert path is not None
    return path
