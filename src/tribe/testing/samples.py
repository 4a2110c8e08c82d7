"""The inputs of the checks: a small network, images, predictions, methods, and a watch on global random generators."""

import copy
import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.rng import Key, normal, uniform
from tribe.data.scenarios import Scenario
from tribe.methods import AnyMethod, Pipeline, with_fields

CLASSES = 4  # of the small network
SIZE = 8  # of images, in pixels
PER_CLASS = 120  # images of each class in each domain: a long tail of 100 leaves none empty


def small_network(
    classes: int = CLASSES, channels: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build a small convolutional classifier with BatchNorm: random weights, running statistics of random images."""
    return copy.deepcopy(_small_network(classes, channels, seed)).to(dtype)


@functools.cache  # the checks need hundreds of them, and the running statistics take most of the time
@torch.inference_mode(False)
def _small_network(classes: int, channels: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, classes),
        )
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.weight.uniform_(0.5, 1.5)
                    layer.bias.normal_(0, 0.2)
            cast(nn.Linear, model[-1]).weight.mul_(16)  # confident: methods must trust some predictions
            model.train()
            for _ in range(20):
                model(torch.rand(32, channels, SIZE, SIZE))
    return model.eval()


def small_backbone(dtype: torch.dtype = torch.float32) -> Backbone:
    """Wrap the small network."""
    return Backbone(small_network(dtype=dtype))


def images(streams: int, batch: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw images (S, B, 3, 8, 8) in [0, 1]; each stream has its own brightness and contrast."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(streams, batch, 3, SIZE, SIZE, generator=generator, dtype=dtype)
    shift = torch.rand(streams, 1, 1, 1, 1, generator=generator, dtype=dtype)
    return (0.3 + 0.7 * x) * (0.4 + 0.6 * shift)


def labels_in_bursts(
    streams: int, images: int, classes: int, stay: float, imbalance: float = 1, seed: int = 0
) -> Tensor:
    """Draw classes (S, N): an image has the class of the one before with probability ``stay``, else it is drawn anew.

    The first class is ``imbalance`` times as frequent as the last.
    """
    key = Key(torch.arange(streams) + seed, torch.zeros(streams, dtype=torch.int64))
    shares = imbalance ** -torch.linspace(0, 1, classes, dtype=torch.float64)
    edges = (shares / shares.sum()).cumsum(0)
    drawn = torch.searchsorted(edges, uniform(key, 1, (images,)).double()).clamp_max(classes - 1)
    anew = uniform(key, 2, (images,)) >= stay
    last = torch.where(anew, torch.arange(images), 0).cummax(1).values  # the image whose class was drawn
    return drawn.gather(1, last)


def predictions(labels: Tensor, classes: int, margin: float = 2.0, heat: float = 2.0, seed: int = 0) -> Tensor:
    """Draw logits (S, N, K) in float64 for images of these classes (S, N): a network without a network.

    The true class is ``margin`` above the others; each logit has noise of standard deviation 1. With ``heat`` 1 the
    softmax is the true posterior; a larger one makes it too sure, as networks are under a shift, a smaller one too
    cautious. A margin of 2 gives about a third of wrong predictions with 10 classes, one of 3 with 100.
    """
    key = Key(torch.arange(len(labels)) + seed, torch.ones(len(labels), dtype=torch.int64))
    noise = normal(key, 3, (labels.shape[1], classes)).double()
    return heat * margin * (noise + margin * torch.nn.functional.one_hot(labels, classes))


def label_sets(scenario: Scenario) -> list[Tensor]:
    """Return labels of every base domain, each in another order."""
    count = 3 if scenario.domains is None else len(scenario.domains)
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(CLASSES * PER_CLASS, generator=generator) % CLASSES for _ in range(count)]


def informed(method: AnyMethod, net: Backbone | None = None) -> AnyMethod:
    """Return the method with the source knowledge it needs, if any, from the small network (or another)."""
    if method.needs is None:
        return method
    net = net or small_backbone()
    sources = [images(1, 16, seed)[0] for seed in range(100, 106)]
    labels = [torch.randint(CLASSES, (16,), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    return with_fields(method, knowledge=method.study(net, zip(sources, labels, strict=True)))


def ready(name: str, **fields: Any) -> AnyMethod:
    """Build a registered method for the small network, with the source knowledge it needs."""
    return informed(methods.create(name, classes=CLASSES, **fields))


def small(method: AnyMethod) -> AnyMethod:
    """Return the method with the values that its class, or its guard's, declares in `small` where they are larger."""
    smaller: dict[str, Any] = {}
    for part in Pipeline.of(method).parts:
        limits: Mapping[str, Any] = getattr(part, "small", {})
        smaller |= {name: limit for name, limit in limits.items() if getattr(part, name) > limit}
    return with_fields(method, **smaller)
