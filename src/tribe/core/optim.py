"""Optimisers as pure functions over rows: every stream has its own moments and its own count of steps."""

from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tribe.core.bounds import COUNT, NOT_NEGATIVE
from tribe.core.state import leaves, tree_map

P = TypeVar("P", bound=tuple[Any, ...])  # a (nested) named tuple of parameters, (S, ...) each


class Adam(NamedTuple):
    """The moments of past gradients (Kingma & Ba, ICLR 2015)."""

    first: Any  # like the parameters, (S, ...) each: moving mean of the gradients
    second: Annotated[Any, NOT_NEGATIVE]  # moving mean of their squares
    steps: Annotated[Tensor, COUNT]  # (S,) int64, taken so far


def adam_init(params: Any) -> Adam:
    """Return moments before the first gradient; ``params`` is a named tuple of tensors, (S, n) each."""
    example = next(iter(leaves(params).values()))
    steps = torch.zeros(len(example), dtype=torch.int64, device=example.device)
    return Adam(tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params), steps)


def adam_step(
    params: P, grads: P, adam: Adam, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> tuple[P, Adam]:
    """Take one step; the same numbers as `torch.optim.Adam`."""
    b1, b2 = betas
    steps = adam.steps + 1
    first = tree_map(lambda m, g: torch.lerp(m, g, 1 - b1), adam.first, grads)
    second = tree_map(lambda v, g: (v * b2).addcmul_(g, g, value=1 - b2), adam.second, grads)

    dtype = next(iter(leaves(params).values())).dtype
    exact = torch.float32 if steps.device.type == "mps" else torch.float64  # b2 ** 1 = .999 loses digits in float32
    c1, c2 = (1 - torch.pow(torch.full_like(steps, 1, dtype=exact) * b, steps) for b in betas)
    rate = (lr / c1).to(dtype).unsqueeze(-1)  # (S, 1)
    root = c2.sqrt().to(dtype).unsqueeze(-1)
    moved = tree_map(lambda p, m, v: p - rate * m / (v.sqrt() / root + eps), params, first, second)
    return moved, Adam(first, second, steps)


def sgd_step(params: P, grads: P, velocity: P, lr: float, momentum: float = 0.9, nesterov: bool = False) -> tuple[P, P]:
    """Take one step; the same numbers as `torch.optim.SGD`. The velocity starts as zeros."""
    velocity = tree_map(lambda v, g: torch.add(g, v, alpha=momentum), velocity, grads)
    ahead = tree_map(lambda v, g: torch.add(g, v, alpha=momentum), velocity, grads) if nesterov else velocity
    return tree_map(lambda p, v: torch.sub(p, v, alpha=lr), params, ahead), velocity
