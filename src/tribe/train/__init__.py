"""Train a source network, the one that is adapted later: by name, from the published files, resumable, with a card.

    trained = tribe.train.train("compact", "mnist", out="compact_mnist.safetensors")
    trained.accuracy, trained.net

Read `recipe` for the numbers, `loop` for what happens to them.
"""

from tribe.train.augmix import AugMix
from tribe.train.checkpoint import CheckpointError
from tribe.train.loop import Progress, Trained, TrainingError, train
from tribe.train.recipe import DEFAULT, PRESETS, Preset, Recipe, change, preset

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
