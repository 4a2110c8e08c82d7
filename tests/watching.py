"""Images that a guard lets pass, clean digits and their network, and a calibration that takes no time."""

import torch
from torch import nn

import tribe
from tribe.health.calibration import Calibration
from tribe.health.estimate import Estimator, Features
from tribe.health.martingale import LEVELS, Reference
from tribe.health.regression import GaussianProcess
from tribe.testing import CLASSES, images

SOME = {"corruptions": ("shot_noise", "fog", "spatter"), "quick": True}  # a preparation of seconds


def pictures(streams, batch, seed=0):
    """Images (S, B, 3, 8, 8) with structure: noise, smoothed, over a gradient."""
    x = nn.functional.avg_pool2d(images(streams, batch, seed).flatten(0, 1), 3, 1, 1).unflatten(0, (streams, batch))
    return (x + torch.linspace(0, 0.4, x.shape[-1])).clamp(0, 1)


def digits(first, count):
    """Clean test digits (N, 1, 28, 28), and their labels."""
    data = tribe.datasets.create("mnist", split="test")
    index = torch.arange(first, first + count)
    return data.images("clean", index), data.labels("clean")[index]


def digits_network():
    """The network that comes with the package."""
    return tribe.models.load("compact", tribe.models.find("compact", "mnist", None))


def calibration_of(net, method="tribe", classes=CLASSES):
    """What `tribe.calibrate` might find for a network: 80 % right, more where predictions are more confident."""
    even = torch.linspace(0.1, 0.9, LEVELS)
    seen = torch.zeros(20, len(Features._fields))
    seen[:, 0] = torch.linspace(-1, 3, 20)  # log-odds of the confidence
    model = GaussianProcess.fit(seen, 1.4 + 0.5 * (seen[:, 0] - 0.5), torch.full((20,), 0.1))
    return Calibration(
        Estimator(classes, 1.0, model, spread=0.1, unseen=0.05),
        method,
        tribe.Backbone(net).fingerprint(exact=False),
        images=200,
        accuracy=0.8,
        corruptions=("fog", "shear", "spatter"),
        normal=Reference(even.expand(classes, LEVELS).clone(), torch.tensor(0.1)),
    )
