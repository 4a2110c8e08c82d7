"""Take the network's own most likely class for the truth and learn from it: pseudo labels (Lee, 2013)."""

from dataclasses import dataclass

from torch import Tensor

from tribe.engine.losses import cross_entropy
from tribe.methods.base import register
from tribe.methods.tent import Tent


@register("pl")
@dataclass(frozen=True)
class PL(Tent):
    """TENT with the cross-entropy of the most likely class in the place of the entropy."""

    paper = "Lee, Pseudo-label: the simple and efficient semi-supervised learning method for deep networks, 2013"

    def loss(self, logits: Tensor) -> Tensor:
        """How far each prediction is from its own most likely class."""
        return cross_entropy(logits, logits.argmax(-1))
