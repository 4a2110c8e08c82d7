"""Learn from predictions that rest on the shape of the object: DeYO, "destroy your object" (Lee et al., ICLR 2024).

A low entropy does not make a prediction reliable: it may rest on colours or the background. So each image is also shown
in pieces, its patches shuffled. What the predicted class loses is the pseudo-label probability difference:

    PLPD(x) = p(y | x) - p(y | pieces of x),  y the most likely class of x
    learn   from the images with Ent(x) < tau_ent and PLPD(x) > tau_plpd                       (Eq. 8 of the paper)
    weight  exp(Ent_0 - Ent(x)) + exp(PLPD(x)), times the entropy of x                         (Eq. 10)

The loss is the mean over the images it learns from. The pieces get statistics of their own, from the images of low
entropy; no gradient flows through them. The statistics of the batch normalise, and affine parameters learn.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from tribe.core import losses, optim, rng
from tribe.core.moments import accumulation_dtype
from tribe.core.state import tree_map
from tribe.fields import Count, Momentum, NotNegative, Range
from tribe.methods import Affine, Backbone, EntropyMethod, Key, ScreenedBatch, register
from tribe.methods.sar import Tail, adapted_channels

SHUFFLE = 0x4445594F  # purpose of the draw, "DEYO" in ASCII


@register("deyo")
@dataclass(frozen=True)
class Deyo(EntropyMethod):
    """DeYO with shuffled patches; the paper's other ways to destroy an object, pixels and occlusion, are not here.

    Published settings: tau_ent, ent_0 and patches for all experiments; tau_plpd 0.2 in the paper's "wild" settings (few
    images, mixed or correlated ones) and 0.3 in its mild one; SGD with 0.00025 for ResNet-50 with BatchNorm. The paper
    has no CIFAR: these presets (Adam, nothing frozen) are those of the comparison in ROID's repository.

    NOTE: the paper freezes layer4 of ResNets and blocks 9 to 11 and the last norm of ViT-B, as SAR does, and
    ``frozen_tail`` is SAR's: ImageNet's preset freezes what the paper does, the default is a quarter of the layers.
    """

    tau_ent: NotNegative = 0.5  # share of log K below which an entropy is low
    tau_plpd: Annotated[float, Range(-1, 1)] = 0.2  # probability that the predicted class must lose in pieces
    ent_0: NotNegative = 0.4  # share of log K: entropies below it have weights above 1
    patches: Count = 4  # in each row and column of an image; as many as pixels: pixels are shuffled
    lr: NotNegative = 0.00025  # learning rate, for batches of 64
    optimizer: Literal["adam", "sgd"] = "sgd"  # sgd: with momentum
    momentum: Momentum = 0.9  # of SGD
    frozen_tail: Tail = 0.25  # frozen layers: a share of all layers, from the end, or names, or "published"

    paper = "Lee et al., Entropy is not enough for test-time adaptation: from the perspective of disentangled factors, \
ICLR 2024"
    presets = {
        "mnist": {"lr": 1e-3, "optimizer": "adam", "frozen_tail": 0.0},
        "cifar10": {"lr": 1e-3, "optimizer": "adam", "frozen_tail": 0.0},
        "cifar100": {"lr": 1e-3, "optimizer": "adam", "frozen_tail": 0.0},
        "imagenet": {"tau_plpd": 0.3, "frozen_tail": "published"},
    }

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> Any:
        """Start at the source."""
        adapted_channels(net, self.frozen_tail)  # checks frozen_tail
        return super().init(net, streams, seed)

    def objective(
        self, net: Backbone, state: Any, batch: ScreenedBatch, affine: Affine, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted entropy of the images that rest on shape."""
        uncertainty = losses.entropy(logits)  # (S, B)
        chosen, weight = self._choose(net, state, batch, logits.detach(), uncertainty.detach())
        return losses.mean_over(weight * uncertainty, chosen), chosen

    def descend(self, net: Backbone, state: Any, grads: Affine) -> tuple[Affine, optim.Adam]:
        """Take a step in the layers that are not frozen."""
        return super().descend(net, state, tree_map(adapted_channels(net, self.frozen_tail).mul, grads))

    @torch.no_grad()
    def _choose(
        self, net: Backbone, state: Any, batch: ScreenedBatch, logits: Tensor, uncertainty: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return which images (S, B) to learn from, and their weights; 0 for the others."""
        unit, valid = math.log(logits.shape[-1]), batch.valid
        certain = valid & (uncertainty < self.tau_ent * unit)
        counted = torch.where(certain.any(1, keepdim=True), certain, valid)  # a pass needs an image that counts
        pieces = net(shuffled(batch.x, self.patches, state.key), *batch.deploy(net, state), valid=counted).logits
        p, q = losses.probabilities(logits), losses.probabilities(pieces)
        predicted = p.argmax(-1, keepdim=True)
        plpd = (p.gather(-1, predicted) - q.gather(-1, predicted)).squeeze(-1)
        chosen = certain & (plpd > self.tau_plpd)
        return chosen, torch.where(chosen, (self.ent_0 * unit - uncertainty).exp() + plpd.exp(), 0)


def shuffled(x: Tensor, patches: int, key: Key) -> Tensor:
    """Images (S, B, C, H, W) with their patches in a random order, each image's own.

    Sizes that ``patches`` does not divide are reduced to the next that it does, and enlarged again.
    """
    if x.dim() != 5:
        raise ValueError(
            f"deyo shuffles the patches of images: it takes (streams, batch, channels, height, width); got a tensor of "
            f"shape {tuple(x.shape)}"
        )
    streams, batch, channels, *size = x.shape
    whole = [patches * max(n // patches, 1) for n in size]
    images = x.flatten(0, 1)
    if whole != size:
        images = _resized(images, whole)
    pieces = images.unflatten(3, (patches, -1)).unflatten(2, (patches, -1))  # (N, C, rows, h, columns, w)
    pieces = pieces.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (N, P, C, h, w), P = patches squared
    order = rng.uniform(key, SHUFFLE, (batch, patches**2)).argsort(dim=-1, stable=True).flatten(0, 1)  # (N, P)
    pieces = pieces.gather(1, order.view(*order.shape, 1, 1, 1).expand_as(pieces))
    pieces = pieces.unflatten(1, (patches, patches)).permute(0, 3, 1, 4, 2, 5)
    mixed = pieces.reshape(streams * batch, channels, *whole)
    return (mixed if whole == size else _resized(mixed, size)).view(x.shape)


def _resized(images: Tensor, size: list[int]) -> Tensor:
    exact = images.to(accumulation_dtype(images.dtype))
    return interpolate(exact, size, mode="bilinear", antialias=True, align_corners=False).to(images.dtype)
