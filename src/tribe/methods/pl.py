"""Take the network's most likely class as the label and learn from it: pseudo labels (Lee, 2013)."""

from dataclasses import dataclass

from torch import Tensor

from tribe.methods import EntropyMethod, losses, register


@register("pl")
@dataclass(frozen=True)
class PL(EntropyMethod):
    """TENT with the cross-entropy of the most likely class instead of the entropy."""

    paper = "Lee, Pseudo-label: the simple and efficient semi-supervised learning method for deep networks, 2013"

    def per_image_loss(self, logits: Tensor) -> Tensor:
        """Return the cross-entropy of each prediction with its own most likely class."""
        return losses.cross_entropy(logits, logits.argmax(-1))
