"""Runs of methods on the contract's network, for tests that compare them with plain loops."""

import torch
from torch import nn

from tribe.core.backbone import Backbone
from tribe.testing import images, small_network

DOUBLE = torch.float64


def network(classes=4, dtype=DOUBLE, sure=1.0):
    """The contract's network; ``sure`` scales its logits."""
    model = small_network(classes, dtype=dtype)
    with torch.no_grad():
        model[-1].weight.mul_(sure)
        model[-1].bias.mul_(sure)
    return Backbone(model)


def batches(steps=4, streams=1, batch=7, dtype=DOUBLE):
    return [images(streams, batch, seed, dtype) for seed in range(steps)]


def at_home(model, x):
    """The network, with the running statistics of images."""
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats(), setattr(layer, "momentum", None)
    with torch.no_grad():
        model.train()(x)
    return model.eval()


def even_network(sources, sure=1.0, home=None):
    """The contract's network, its classifier shifted so that all classes are predicted; perhaps ``home`` somewhere."""
    model = small_network(4, dtype=DOUBLE)
    if home is not None:
        at_home(model, home)
    with torch.no_grad():
        logits = model(torch.cat([x[0] for x in sources]))
        model[-1].bias -= logits.mean(0)
        for parameter in (model[-1].weight, model[-1].bias):
            parameter.mul_(sure / (logits - logits.mean(0)).std())
    return Backbone(model)


def varied(steps, batch=9, dtype=DOUBLE, first=0):
    """Batches of one stream whose images differ in brightness and in strength of each colour, so in class."""

    def tinted(seed):
        x = images(batch, 1, seed, dtype).transpose(0, 1)
        tint = torch.rand(1, batch, 3, 1, 1, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        return x * tint

    return [tinted(seed) for seed in range(first, first + steps)]


def repeated(device=None):
    """Replaces CUDA graphs where there are none: the same work on the same static memory."""

    def record(work):
        work()
        return work

    return record


def darker(x):
    return x.flip(-1) * 0.8


def play(method, net, xs, state=None, seed=0, valid=None):
    state = method.init(net, len(xs[0]), seed) if state is None else state
    outputs = []
    for i, x in enumerate(xs):
        y, state = method.step(net, state, x, None if valid is None else valid[i])
        outputs.append(y)
    return outputs, state
