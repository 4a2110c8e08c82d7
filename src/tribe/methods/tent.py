"""Learn from the network's own predictions, one step a batch, with batch statistics: TENT and pseudo labels."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tribe.fields import Momentum
from tribe.methods import EntropyMethod, losses, register

# NOTE: TENT's authors play ImageNet with SGD at 0.00025, the preset imagenet-authors; the comparison TRIBE is part of,
# and so the preset imagenet, has Adam at 1e-3.
IMAGENET = {"classes": 1000, "lr": 0.00025, "optimizer": "sgd"}


@register("tent")
@dataclass(frozen=True)
class Tent(EntropyMethod):
    """Make the network more certain of its own predictions, one step a batch: TENT (Wang et al., ICLR 2021).

    The affine parameters follow the gradient of the mean entropy.
    """

    optimizer: Literal["adam", "sgd"] = "adam"  # sgd: with momentum
    momentum: Momentum = 0.9  # of SGD

    presets = {"imagenet-authors": IMAGENET}
    paper = "Wang et al., Tent: fully test-time adaptation by entropy minimization, ICLR 2021"


@register("pl")
@dataclass(frozen=True)
class PL(EntropyMethod):
    """Take the network's most likely class as the label and learn from it: pseudo labels (Lee, 2013).

    TENT with the cross-entropy of the most likely class instead of the entropy.
    """

    optimizer: Literal["adam", "sgd"] = "adam"  # sgd: with momentum
    momentum: Momentum = 0.9  # of SGD

    presets = {"imagenet-authors": IMAGENET}  # as TENT's paper plays it
    paper = "Lee, Pseudo-label: the simple and efficient semi-supervised learning method for deep networks, 2013"

    def per_image_loss(self, logits: Tensor) -> Tensor:
        """Return the cross-entropy of each prediction with its own most likely class."""
        return losses.cross_entropy(logits, logits.argmax(-1))
