"""Models, optimizer and schedule as recipes name them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.errors import RecipeError
from slipstream.train.build import build_model, build_optimizer, build_schedule
from slipstream.train.models import make_model
from training_runs import tiny_images, tiny_recipe

CPU = torch.device("cpu")


@pytest.mark.parametrize("pixels", [8, 15, 16, 28, 33])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_small_model_takes_any_image_and_all_of_it_learns(pixels: int, channels: int) -> None:
    model = make_model(
        "resnet_small", width=4, channels=channels, image_size=(pixels, pixels), num_classes=5
    )
    logits = model(torch.randn(3, channels, pixels, pixels))
    assert logits.shape == (3, 5)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
@pytest.mark.parametrize("channels", [1, 3])
def test_torchvision_models_take_the_images_channels(name: str, channels: int) -> None:
    model = make_model(name, width=4, channels=channels, image_size=(32, 32), num_classes=7)
    assert model(torch.randn(2, channels, 32, 32)).shape == (2, 7)
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    assert first.in_channels == channels


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet_smal", "the nearest is 'resnet_small'"),
        ("resnet81", "the nearest is 'resnet1"),
        ("vit_b_16", "cannot take images of 1x28x28"),
        ("googlenet", "one vector of 10 logits"),
    ],
)
@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_models_that_cannot_be_are_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=r"model\.name") as caught:
        make_model(name, width=4, channels=1, image_size=(28, 28), num_classes=10)
    assert reason in str(caught.value)


def test_weights_depend_on_the_seed_alone() -> None:
    def weights(*overrides: str) -> list[torch.Tensor]:
        torch.manual_seed(len(overrides))
        return list(build_model(tiny_recipe(*overrides), tiny_images(), CPU).parameters())

    same = zip(weights(), weights("run.log_every_steps=3"), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    other = zip(weights(), weights("train.seed=1"), strict=True)
    assert not all(torch.equal(a, b) for a, b in other)


def test_the_recipe_chooses_the_memory_layout() -> None:
    for is_last, layout in ((True, torch.channels_last), (False, torch.contiguous_format)):
        recipe = tiny_recipe(f"model.channels_last={str(is_last).lower()}")
        model = build_model(recipe, tiny_images(), CPU)
        kernels = [
            p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1
        ]
        assert kernels
        assert all(kernel.is_contiguous(memory_format=layout) for kernel in kernels)


def test_norms_and_biases_do_not_decay_and_nobody_is_left_out() -> None:
    recipe = tiny_recipe("optimizer.weight_decay=0.01")
    model = build_model(recipe, tiny_images(), CPU)
    groups = build_optimizer(recipe, model).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {id(p): 0.01 if p.dim() > 1 else 0.0 for p in model.parameters()}
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in groups)


def test_the_schedule_counts_updates_of_the_recipes_epochs() -> None:
    recipe = tiny_recipe(
        "train.epochs=4",
        "schedule.warmup_epochs=0.5",
        'schedule.kind="step"',
        "schedule.step_epochs=3",
    )
    schedule = build_schedule(recipe, steps_per_epoch=10)
    rates = [schedule.rate(update) / 0.05 for update in (0, 4, 5, 29, 30, 39)]
    assert rates == pytest.approx([0.2, 1.0, 1.0, 1.0, 0.1, 0.1])
