"""Recipes: the hyper-parameters of a training. A preset is a named recipe with its network."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, get_args

from reproduction.augment import AugMix, Border
from tribe.fields import plain_numbers, require_whole
from tribe.registry import nearest

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Recipe:
    """The hyper-parameters of a training. The learning rate rises during the warm-up, then falls to zero."""

    epochs: int
    batch: int = 128  # images a step; those left over at the end of an epoch are not used in it
    optimizer: str = "sgd"  # with Nesterov's momentum; or adam, adamw
    lr: float = 0.1  # the highest learning rate
    momentum: float = 0.9  # of sgd
    weight_decay: float = 5e-4  # not of biases and normalisation
    schedule: str = "cosine"  # how the learning rate falls
    warmup: float = 0.0  # share of the steps during which it rises; one-cycle is about a quarter, then linear
    smoothing: float = 0.0  # of labels; 0 by default, since many methods use the confidence of the network
    shift: int = 4  # pixels an image is shifted at most, in each direction
    border: Border = "reflect"  # what fills the pixels from outside
    flip: bool = False  # mirror half of the images, left to right
    cutout: int = 0  # side of a square that is set to 0, in pixels (DeVries and Taylor, 2017)
    augmix: AugMix | None = None

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_whole(self, "epochs", "batch")
        require_whole(self, "shift", "cutout", least=0)
        for field, choices in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("border", get_args(Border))):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} is one of {', '.join(choices)}; got {getattr(self, field)!r}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite; got {self.lr}")
        for field, end in (("weight_decay", math.inf), ("momentum", 1), ("warmup", 1), ("smoothing", 1)):
            if not 0 <= getattr(self, field) < end:
                raise ValueError(f"{field} must lie in [0, {end}); got {getattr(self, field)}")

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, out of all steps of the training.

        >>> recipe = Recipe(epochs=1, lr=1.0, schedule="linear", warmup=0.25)
        >>> [recipe.rate(step, 8) for step in (0, 1, 2, 5, 7)]
        [0.5, 1.0, 1.0, 0.5, 0.16666666666666663]
        """
        rise = math.ceil(self.warmup * steps)
        if step < rise:
            return self.lr * (step + 1) / rise
        done = (step - rise) / (steps - rise)
        if self.schedule == "linear":
            return self.lr * (1 - done)
        return self.lr * (0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0)


class Preset(NamedTuple):
    """A recipe and the network it was chosen for."""

    model: str
    recipe: Recipe


DEFAULT = "fast"  # the shortest training
PRESETS: Mapping[str, Mapping[str, Preset]] = {
    "mnist": {
        # Adam with one cycle: 99.5 % in eight epochs. Shifts by two pixels, and no augmentation that resembles the
        # corruptions of MNIST-C: the network is their source model.
        "fast": Preset(
            "compact",
            Recipe(
                epochs=8,
                optimizer="adamw",
                lr=1e-2,
                weight_decay=1e-2,
                schedule="linear",
                warmup=0.25,
                shift=2,
                border="zero",
            ),
        ),
        # TRIBE (Su et al., AAAI-24), MNIST-C: Adam at 1e-3, cosine, 100 epochs, no augmentation.
        "paper": Preset("resnet18_mnist", Recipe(epochs=100, optimizer="adam", lr=1e-3, weight_decay=0.0, shift=0)),
    },
    "cifar10": {
        # One cycle needs far fewer than the usual 200 epochs. A batch of 256 keeps a large GPU busy (5 s an epoch on
        # an H200 in bf16; 512 gain 6 %). 30 epochs without cutout gave 94.58 %, and 99.6 % on the training images.
        "fast": Preset(
            "wrn28_10", Recipe(epochs=46, batch=256, lr=0.2, schedule="linear", warmup=0.25, flip=True, cutout=8)
        ),
        # Zagoruyko and Komodakis, with a cosine schedule in place of their steps.
        "full": Preset("wrn28_10", Recipe(epochs=200, lr=0.1, flip=True)),
    },
    "cifar100": {
        "fast": Preset("resnext29", Recipe(epochs=40, batch=256, lr=0.2, schedule="linear", warmup=0.25, flip=True)),
        # Hendrycks et al., ICLR 2020: the recipe of RobustBench's ResNeXt-29; the border is zero.
        "augmix": Preset("resnext29", Recipe(epochs=200, lr=0.1, border="zero", flip=True, augmix=AugMix())),
    },
}


def preset(dataset: str, name: str = DEFAULT) -> Preset:
    """Return a preset by data set and name.

    >>> preset("mnist").model
    'compact'
    """
    if dataset not in PRESETS:
        raise ValueError(f"no recipe for data set {dataset!r}: {nearest(dataset, PRESETS)}; pass a Recipe")
    if name not in PRESETS[dataset]:
        raise ValueError(f"{dataset} has no preset {name!r}: {nearest(name, PRESETS[dataset])}")
    return PRESETS[dataset][name]


def change(recipe: Recipe, **changes: Any) -> Recipe:
    """Return a recipe with some fields changed.

    >>> change(preset("mnist").recipe, epochs=2).epochs
    2
    """
    names = [field.name for field in fields(recipe)]
    for field in changes:
        if field not in names:
            raise ValueError(f"a recipe has no field {field!r}: {nearest(field, names)}")
    return replace(recipe, **changes)
