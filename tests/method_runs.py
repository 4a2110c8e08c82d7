"""Runs of methods on the contract's network, for tests that compare them with plain loops."""

import torch

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


def play(method, net, xs, state=None, seed=0):
    state = method.init(net, len(xs[0]), seed) if state is None else state
    outputs = []
    for x in xs:
        y, state = method.step(net, state, x)
        outputs.append(y)
    return outputs, state


def assert_affine(affine, weights, biases, atol=1e-10):
    torch.testing.assert_close(affine.weight[0], torch.cat([w.detach() for w in weights]), rtol=0, atol=atol)
    torch.testing.assert_close(affine.bias[0], torch.cat([b.detach() for b in biases]), rtol=0, atol=atol)
