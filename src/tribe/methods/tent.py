"""Learn from the network's own predictions, one step a batch, with batch statistics: TENT and pseudo labels."""

from dataclasses import dataclass

from torch import Tensor

from tribe.methods import EntropyMethod, losses, register


@register("tent")
@dataclass(frozen=True)
class Tent(EntropyMethod):
    """Make the network more certain of its own predictions, one step a batch: TENT (Wang et al., ICLR 2021).

    The affine parameters follow the gradient of the mean entropy.
    """

    paper = "Wang et al., Tent: fully test-time adaptation by entropy minimization, ICLR 2021"


@register("pl")
@dataclass(frozen=True)
class PL(EntropyMethod):
    """Take the network's most likely class as the label and learn from it: pseudo labels (Lee, 2013).

    TENT with the cross-entropy of the most likely class instead of the entropy.
    """

    paper = "Lee, Pseudo-label: the simple and efficient semi-supervised learning method for deep networks, 2013"

    def per_image_loss(self, logits: Tensor) -> Tensor:
        """Return the cross-entropy of each prediction with its own most likely class."""
        return losses.cross_entropy(logits, logits.argmax(-1))
