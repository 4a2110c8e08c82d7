"""Adam (Kingma & Ba, ICLR 2015) as a pure function over rows: every stream has its own moments and its own steps."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tribe.engine.state import leaves, tree_map

P = TypeVar("P")  # a tree of parameters


class Adam(NamedTuple):
    """What Adam remembers of past gradients."""

    first: Any  # like the parameters, (S, ...) each: moving mean of the gradients
    second: Any  # moving mean of their squares
    steps: Tensor  # (S,) int64, taken so far


def init(params: Any) -> Adam:
    """No gradient seen yet; ``params`` is a named tuple of tensors, (S, n) each."""
    some = _some(params)
    steps = torch.zeros(len(some), dtype=torch.int64, device=some.device)
    return Adam(tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params), steps)


def step(
    params: P,
    grads: P,
    adam: Adam,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[P, Adam]:
    """One step; the same numbers as `torch.optim.Adam`."""
    b1, b2 = betas
    steps = adam.steps + 1
    first = tree_map(lambda m, g: torch.lerp(m, g, 1 - b1), adam.first, grads)
    second = tree_map(lambda v, g: (v * b2).addcmul_(g, g, value=1 - b2), adam.second, grads)

    dtype = _some(params).dtype
    exact = torch.float32 if steps.device.type == "mps" else torch.float64  # b2 ** 1 = .999 loses digits in float32
    c1, c2 = (1 - torch.pow(torch.full_like(steps, 1, dtype=exact) * b, steps) for b in betas)
    rate = (lr / c1).to(dtype).unsqueeze(-1)  # (S, 1)
    root = c2.sqrt().to(dtype).unsqueeze(-1)

    def move(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - rate * m / (v.sqrt() / root + eps)

    return tree_map(move, params, first, second), Adam(first, second, steps)


def _some(params: Any) -> Tensor:
    return next(iter(leaves(params).values()))
