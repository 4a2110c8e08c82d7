"""Learn only from confident images."""

from dataclasses import dataclass

from tribe.methods import EntropyMethod, losses, register


@register("confident")
@dataclass(frozen=True)
class Confident(EntropyMethod):
    """TENT, but only images with a confidence above a threshold count."""

    threshold: float = 0.5  # confidence above which an image counts

    paper = "an example"

    def objective(self, net, state, batch, affine, logits):
        """Return the loss of each stream (S,), and the images (S, B) that it trusts."""
        confidence = losses.probabilities(logits.detach()).amax(-1)  # (S, B)
        trusted = batch.valid & (confidence > self.threshold)
        return losses.mean_over(losses.entropy(logits), trusted), trusted


if __name__ == "__main__":  # python examples/my_method.py checks it
    from tribe.testing import check_method

    check_method(Confident(classes=4))
    print("the method keeps the contract")
