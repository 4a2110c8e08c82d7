"""As it was recorded: every image once, in the order of the files, domain after domain. Needs no labels."""

from dataclasses import dataclass

import numpy as np

from tribe.scenarios.base import Scenario, register
from tribe.scenarios.sampling import Ints, Random


@register("replay")
@dataclass(frozen=True)
class Replay(Scenario):
    """Play the files in order, without a reset; for the pictures of your own camera, labelled (or partly) or not."""

    needs_labels = False
    same_for_all_seeds = "the order of the files is the stream; only order='random' draws"

    def play(self, labels: Ints, classes: int, rng: Random) -> Ints:
        """Play the first image first."""
        return np.arange(len(labels))
