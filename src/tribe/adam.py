"""Adam (Kingma & Ba, ICLR 2015) as a pure function over rows: every stream has its own moments and its own steps."""

from typing import NamedTuple

import torch
from torch import Tensor

from tribe.state import Affine, tree_map


class Adam(NamedTuple):
    """What Adam remembers of past gradients."""

    first: Affine  # (S, C), moving mean of the gradients
    second: Affine  # (S, C), moving mean of their squares
    steps: Tensor  # (S,) int64, taken so far


def init(params: Affine) -> Adam:
    """No gradient seen yet."""
    steps = torch.zeros(params.weight.shape[0], dtype=torch.int64, device=params.weight.device)
    return Adam(tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params), steps)


def step(
    params: Affine,
    grads: Affine,
    adam: Adam,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Affine, Adam]:
    """One step; the same numbers as `torch.optim.Adam`."""
    b1, b2 = betas
    steps = adam.steps + 1
    first = tree_map(lambda m, g: torch.lerp(m, g, 1 - b1), adam.first, grads)
    second = tree_map(lambda v, g: (v * b2).addcmul_(g, g, value=1 - b2), adam.second, grads)

    dtype = params.weight.dtype
    exact = torch.float32 if steps.device.type == "mps" else torch.float64  # b2 ** 1 = .999 loses digits in float32
    c1, c2 = (1 - torch.pow(torch.full_like(steps, 1, dtype=exact) * b, steps) for b in betas)
    rate = (lr / c1).to(dtype).unsqueeze(-1)  # (S, 1)
    root = c2.sqrt().to(dtype).unsqueeze(-1)

    def move(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - rate * m / (v.sqrt() / root + eps)

    return tree_map(move, params, first, second), Adam(first, second, steps)
