"""Methods as plain PyTorch loops, from the equations of their papers: ordinary layers, backward() and torch.optim.

One stream, one image after another where that is clearer. They share no code with the library but the network that
`Backbone.plain` makes of ordinary layers; random draws are arguments.
"""

import math

import torch
from torch import nn


def ordinary(net, statistics=None):
    """The network with ordinary layers, and the scales and shifts of its BatchNorm layers in order.

    Without ``statistics`` its BatchNorm layers use each batch's own.
    """
    module = net.plain(net.source()[0], statistics)
    layers = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    for layer in layers:
        layer.requires_grad_(True)
    return module, [m.weight for m in layers], [m.bias for m in layers]


def entropy_of(logits):
    """Of one image."""
    return -(logits.softmax(0) * logits.log_softmax(0)).sum()


def in_pieces(image, patches, order):
    """One image (C, H, W): the patch at place i comes from place order[i], row by row."""
    height, width = image.shape[1] // patches, image.shape[2] // patches
    mixed = torch.zeros_like(image)

    def at(place):
        row, column = place // patches * height, place % patches * width
        return slice(row, row + height), slice(column, column + width)

    for to, place in enumerate(order):
        (to_rows, to_columns), (rows, columns) = at(to), at(place)
        mixed[:, to_rows, to_columns] = image[:, rows, columns]
    return mixed


def deyo(net, xs, orders, *, tau_ent, tau_plpd, ent_0, patches, frozen=(), optimiser):
    """DeYO (ICLR 2024); ``orders`` are the places of the patches of every image, ``frozen`` layers do not learn.

    Returns the logits of each batch, the scales and shifts, and how many images each batch taught.
    """
    module, weights, biases = ordinary(net)
    learning = [p for i, pair in enumerate(zip(weights, biases, strict=True)) if i not in frozen for p in pair]
    step, outputs, taught = optimiser(learning), [], []
    for x, order in zip(xs, orders, strict=True):
        logits = module(x)
        outputs.append(logits.detach())
        unit = math.log(logits.shape[1])
        low = [i for i in range(len(x)) if float(entropy_of(logits[i].detach())) < tau_ent * unit]
        terms = []
        if low:
            with torch.no_grad():
                others = module(torch.stack([in_pieces(x[i], patches, order[i]) for i in low]))
            for i, other in zip(low, others, strict=True):
                entropy, label = entropy_of(logits[i]), int(logits[i].argmax())
                plpd = float(logits[i].softmax(0)[label].detach() - other.softmax(0)[label])
                if plpd > tau_plpd:
                    weight = 1 / math.exp(float(entropy.detach()) - ent_0 * unit) + 1 / math.exp(-plpd)
                    terms.append(weight * entropy)
        taught.append(len(terms))
        if terms:
            step.zero_grad()
            (sum(terms) / len(terms)).backward()
            step.step()
    return outputs, weights, biases, taught
