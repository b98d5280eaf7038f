"""The networks that recipes can name: a small residual CNN, and torchvision's classifiers."""

from __future__ import annotations

import copy
import difflib

import torch
from torch import Tensor, nn

from slipstream.errors import RecipeError

SMALL = "resnet_small"
# Below this many pixels a stem of stride 2 leaves too few positions to look at.
_HALVE_FROM_PIXELS = 16


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut: [B, in, H, W] -> [B, out, H/s, W/s].

    The shortcut is the identity where shapes allow it, else a strided 1x1 convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the two convolutions make of `x` to the shortcut's."""
        y = self.norm1(self.conv1(x)).relu_()
        y = self.norm2(self.conv2(y))
        return torch.relu_(y.add_(self.shortcut(x)))


class SmallResNet(nn.Module):
    """A stem and three residual blocks, made for images of 8 to 64 pixels on CPUs.

    images [B, channels, H, W] -> logits [B, num_classes]. With width w the stem and block 1 have w
    channels, block 2 halves the positions and has 2 w, block 3 keeps 2 w. The stem halves images of
    16 pixels or more: most of the time of a CNN goes into its first, largest maps.
    """

    def __init__(
        self, *, width: int, channels: int, image_size: tuple[int, int], num_classes: int
    ) -> None:
        super().__init__()
        stride = 2 if min(image_size) >= _HALVE_FROM_PIXELS else 1
        self.stem = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, stride=1),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 2 * width, stride=1),
        )
        self.head = nn.Linear(2 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x = self.blocks(self.norm(self.stem(images)).relu_())
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def make_model(
    name: str, *, width: int, channels: int, image_size: tuple[int, int], num_classes: int
) -> nn.Module:
    """A freshly initialised model, drawn from torch's current random state.

    name: "resnet_small" or one of torchvision.models; the first convolution of the latter is
    replaced where it expects another number of channels. Raises RecipeError for an unknown name,
    and for a model that cannot turn such images into [B, num_classes] logits.
    """
    if name == SMALL:
        return SmallResNet(
            width=width, channels=channels, image_size=image_size, num_classes=num_classes
        )
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        near = difflib.get_close_matches(name, [SMALL, *known], n=1, cutoff=0.0)[0]
        raise RecipeError(
            f"model.name={name!r} is neither {SMALL!r} nor a classifier of torchvision.models; "
            f"the nearest is {near!r}."
        )
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes)
    _accept_channels(model, channels)
    _check_fit(model, name, (channels, *image_size), num_classes)
    return model


def _accept_channels(model: nn.Module, channels: int) -> None:
    """Replaces the model's first convolution where it expects another number of channels."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.Conv2d):
            continue
        if module.in_channels != channels:
            parent, _, attribute = path.rpartition(".")
            # Only the first convolution sees the image, and it is never a grouped one.
            adapted = nn.Conv2d(
                channels,
                module.out_channels,
                _pair(module.kernel_size),
                _pair(module.stride),
                padding=module.padding
                if isinstance(module.padding, str)
                else _pair(module.padding),
                bias=module.bias is not None,
            )
            setattr(model.get_submodule(parent), attribute, adapted)
        return


def _pair(size: tuple[int, ...]) -> tuple[int, int]:
    return size[0], size[1]


def _check_fit(
    model: nn.Module, name: str, image_shape: tuple[int, int, int], num_classes: int
) -> None:
    """Raises RecipeError unless a batch of two images gives [2, num_classes] (shapes only)."""
    shadow = copy.deepcopy(model).to("meta").train()
    shape = "x".join(str(size) for size in image_shape)
    try:
        logits = shadow(torch.empty(2, *image_shape, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise RecipeError(
            f"model.name={name!r} cannot take images of {shape} ({reason}); "
            f"choose another model, such as {SMALL!r} or 'resnet18'."
        ) from error
    if not isinstance(logits, Tensor) or logits.shape != (2, num_classes):
        raise RecipeError(
            f"model.name={name!r} does not give one vector of {num_classes} logits an image; "
            f"choose another model, such as {SMALL!r} or 'resnet18'."
        )
