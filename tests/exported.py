"""Networks and adapters that tests export as model files, and images for them."""

import functools

import torch

import tribe
from tribe import models
from tribe.health.prepared import Card, CardRow, Inputs, describe
from tribe.methods.building import build_method
from tribe.testing import images, small_network

WORLDS = ("fog", "dotted_line", "impulse_noise", "scale")


@functools.cache
def digits_network():
    return models.load("compact", models.find("compact", "mnist"))


@functools.cache
def digits(count=1024):
    """Digits in four worlds, one after the other, and their classes."""
    data = tribe.datasets.create("live-mnist-c", corruptions=WORLDS)
    each = count // len(data.domains)
    index = torch.arange(each)
    images = [data.images(domain, index) for domain in data.domains]
    return torch.cat(images), torch.cat([data.labels(domain)[index] for domain in data.domains])


def marked():
    """An adapter of a small network with a time filter that has seen a few images; every image is observed."""
    sticky = tribe.filters.create("time-checked", evidence_on=1.0)
    adapter = tribe.adapt(small_network(), "bank", compare=0, observe=1, time=sticky)
    adapter(images(1, 20)[0])
    return adapter


def prepared():
    """A prepared file of the digits network, as `tribe.prepare` makes one where the budget leaves time to learn."""
    net = tribe.Backbone(digits_network())
    method = build_method(net, "bank-tribe+guard+time-checked", None, None, {"learn_every": 8})
    card = Card((CardRow("clean", 200, 0.1, 0.1),), (), 0, False, None, None, "here")
    inputs = Inputs((1, 28, 28), 0.0, 1.0, (0.13,), (0.31,))
    return tribe.Prepared(
        net.fingerprint(exact=False),
        **describe(method),
        calibration=None,
        inputs=inputs,
        card=card,
        origin={"model": "compact"},
    )


FILES = {  # the network or the adapter, the shape of an image, and options
    "digits": (digits_network, (1, 28, 28), {}),
    "marked": (marked, (3, 8, 8), {"valid": True, "opset": 20}),
    "watched": (small_network, (3, 16, 16), {"frames": True, "uint8": True, "source_logits": True, "observe": 1}),
}
