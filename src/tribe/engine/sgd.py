"""Gradient descent with momentum as a pure function over rows, beside `tribe.engine.adam`."""

from typing import TypeVar

import torch

from tribe.engine.state import tree_map

P = TypeVar("P", bound=tuple[object, ...])  # a named tuple of parameters, (S, ...) each


def step(params: P, grads: P, velocity: P, lr: float, momentum: float = 0.9, nesterov: bool = False) -> tuple[P, P]:
    """One step; the same numbers as `torch.optim.SGD`. The velocity starts as zeros."""
    velocity = tree_map(lambda v, g: torch.add(g, v, alpha=momentum), velocity, grads)
    ahead = tree_map(lambda v, g: torch.add(g, v, alpha=momentum), velocity, grads) if nesterov else velocity
    return tree_map(lambda p, v: torch.sub(p, v, alpha=lr), params, ahead), velocity
