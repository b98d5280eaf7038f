"""From a recipe to the parts of a run: data, model, optimizer and schedule."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from slipstream.data import (
    Augment,
    Batches,
    EpochSampler,
    ImageSet,
    channel_statistics,
    load_images,
)
from slipstream.optim.schedules import Schedule
from slipstream.train.distributed import Job
from slipstream.train.models import make_model
from slipstream.train.recipe import Recipe

# Ranks may be threads of one process, which share torch's random state.
_BUILDING = threading.Lock()


@dataclass(frozen=True)
class Data:
    """Images to train and to test on, and what deals and shapes the former.

    mean, std: per channel, of the training images' pixels scaled to [0, 1].
    """

    train: ImageSet
    test: ImageSet
    sampler: EpochSampler
    augment: Augment
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def batches(self, epoch: int, start_step: int) -> Batches:
        """The batches of an epoch (counted from 0), from a step on, prepared ahead."""
        return Batches(
            self.train,
            self.sampler,
            epoch,
            start_step=start_step,
            augment=self.augment,
            seed=self.sampler.seed,
            mean=self.mean,
            std=self.std,
        )


def build_data(recipe: Recipe, job: Job) -> Data:
    """Loads the recipe's images and deals them to the job's ranks.

    Raises DataError for files that are missing or damaged and for batches that do not fit.
    """
    train, test = load_images(
        recipe.data.dataset, Path(recipe.data.folder) if recipe.data.folder else None
    )
    return deal(recipe, job, train, test)


def deal(recipe: Recipe, job: Job, train: ImageSet, test: ImageSet) -> Data:
    """Deals loaded images to the job's ranks. Raises DataError for batches that do not fit."""
    sampler = EpochSampler(
        len(train),
        world_size=job.world_size,
        rank=job.rank,
        global_batch_size=recipe.train.global_batch_size,
        accumulation_steps=recipe.train.accumulation_steps,
        seed=recipe.train.seed,
    )
    augment = Augment(
        crop_padding=recipe.augment.crop_padding, horizontal_flip=recipe.augment.horizontal_flip
    )
    mean, std = channel_statistics(train)
    return Data(train, test, sampler, augment, mean, std)


def build_model(recipe: Recipe, images: ImageSet, device: torch.device) -> nn.Module:
    """The recipe's model for such images, drawn from the recipe's seed, on `device`.

    Raises RecipeError for a model that is unknown or cannot take the images.
    """
    _, channels, height, width = images.images.shape
    with _BUILDING:
        torch.manual_seed(recipe.train.seed)
        model = make_model(
            recipe.model.name,
            width=recipe.model.width,
            channels=channels,
            image_size=(height, width),
            num_classes=len(images.classes),
        )
    layout = torch.channels_last if recipe.model.channels_last else torch.contiguous_format
    return model.to(device).to(memory_format=layout)


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """SGD over all trainable parameters; those of one dimension (norms, biases) do not decay.

    Without momentum where the engine applies it.
    """
    settings = recipe.optimizer
    has_momentum = not recipe.corrects_momentum
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trainable if p.dim() > 1],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return SGD(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        momentum=settings.momentum if has_momentum else 0.0,
        nesterov=settings.nesterov and has_momentum,
        fused=True,
    )


def build_schedule(recipe: Recipe, steps_per_epoch: int) -> Schedule:
    """The recipe's learning rate over all of its updates.

    The warm-up takes at most half of them, rounded down: a short run trains at its peak rate, too.
    """
    settings = recipe.schedule
    num_updates = recipe.train.epochs * steps_per_epoch
    return Schedule(
        kind=settings.kind,
        peak=recipe.optimizer.learning_rate,
        num_updates=num_updates,
        warmup_updates=min(num_updates // 2, round(settings.warmup_epochs * steps_per_epoch)),
        final_fraction=settings.final_fraction,
        power=settings.power,
        step_updates=settings.step_epochs * steps_per_epoch,
        step_factor=settings.step_factor,
    )
