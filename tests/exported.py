"""Networks and adapters that tests export as model files, and images for them."""

import functools

import torch

import tribe
from tribe import models
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
    sticky = tribe.filters.create("time", evidence_on=1.0)
    adapter = tribe.adapt(small_network(), "bank", compare=0, observe=1, time=sticky)
    adapter(images(1, 20)[0])
    return adapter


FILES = {  # the network or the adapter, the shape of an image, and options
    "digits": (digits_network, (1, 28, 28), {}),
    "marked": (marked, (3, 8, 8), {"valid": True, "opset": 20}),
    "watched": (small_network, (3, 16, 16), {"frames": True, "uint8": True, "source_logits": True, "observe": 1}),
}
