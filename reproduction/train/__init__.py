"""Train a source network from the published images: resumable, with a card that says how it was trained.

    trained = reproduction.train.train("compact", "mnist", out="compact_mnist.safetensors")
    trained.accuracy, trained.net

`recipe` holds the hyper-parameters, `loop` the training loop, `learner` one epoch.
"""

from reproduction.train.augmix import AugMix
from reproduction.train.checkpoint import CheckpointError
from reproduction.train.loop import Progress, Trained, TrainingError, train
from reproduction.train.recipe import DEFAULT, PRESETS, Preset, Recipe, change, preset

__all__ = [
    "DEFAULT",
    "PRESETS",
    "AugMix",
    "CheckpointError",
    "Preset",
    "Progress",
    "Recipe",
    "Trained",
    "TrainingError",
    "change",
    "preset",
    "train",
]
