"""Random numbers as a pure function of (seed, clock, purpose, position).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) written in integer tensor
operations. The only state is a seed and a clock per stream, nothing synchronises with the host, and every device gives
the same words. So "together equals alone" and "resumed equals uninterrupted" hold exactly.

Shapes: S streams, one row each.

>>> key = Key(seed=torch.tensor([425]), clock=torch.tensor([0]))
>>> torch.equal(uniform(key, 1, (2, 3)).flatten(), uniform(key, 1, (9,))[0, :6])
True
"""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import ANY, COUNT

ROUNDS = 10
MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the two key words after every round
WORD = 0xFFFFFFFF


class Key(NamedTuple):
    """Seed and clock of each stream: all that a draw depends on, apart from its purpose."""

    seed: Annotated[Tensor, ANY]  # (S,) int64, any value
    clock: Annotated[Tensor, COUNT]  # (S,) int64; it counts the steps


def bits(key: Key, purpose: int, n: int) -> Tensor:
    """Draw (S, n) int64 words, uniform on [0, 2**32); `purpose` (a 32-bit number) separates draws of one step."""
    return torch.stack(_words(key, purpose, n), -1).flatten(1)[:, :n]


def uniform(key: Key, purpose: int, shape: Sequence[int]) -> Tensor:
    """Draw (S, *shape) float32, uniform on the multiples of 2**-24 in [0, 1)."""
    words = bits(key, purpose, math.prod(shape))
    return (words >> 8).to(torch.float32).mul_(2.0**-24).view(len(words), *shape)


def normal(key: Key, purpose: int, shape: Sequence[int]) -> Tensor:
    """Draw (S, *shape) float32, standard normal; never infinite, at most 6.8 in size."""
    n = math.prod(shape)
    w0, w1, w2, w3 = (word.to(torch.float32) for word in _words(key, purpose, n))
    block = []
    for radius, angle in ((w0, w1), (w2, w3)):  # Box-Muller, twice a block
        radius.add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()  # the half word keeps the logarithm finite
        angle.mul_(math.tau * 2.0**-32)
        block += [radius * angle.cos(), radius.mul_(angle.sin_())]
    return torch.stack(block, -1).flatten(1)[:, :n].reshape(len(w0), *shape)


def _words(key: Key, purpose: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words, (S, blocks) each, of the blocks that hold the first n words of every stream."""
    seed, clock = key.seed[:, None], key.clock[:, None]  # (S, 1)
    block = torch.arange(-(-n // 4), device=seed.device)[None]  # (1, blocks), varies along a row
    # The mask is for compilers: they treat a product of `arange` as an address, and addresses as 32-bit numbers.
    counter = block & WORD, clock & WORD, clock >> 32 & WORD, torch.full_like(clock, purpose)
    return _philox(counter, (seed & WORD, seed >> 32 & WORD))


def _philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox4x32-10 of 32-bit words held in int64; counter and key words broadcast against each other."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        # A product may wrap to a negative number: its 64 bits are still correct. Its sign then fills the high half of
        # `>> 32`, and the low word c1 or c3 is the product unmasked; one mask per factor clears the extra bits of both.
        p0, p1 = c0 * MULTIPLIER[0], c2 * MULTIPLIER[1]
        c0, c1 = (p1 >> 32 ^ c1).bitwise_xor_(k0).bitwise_and_(WORD), p1
        c2, c3 = (p0 >> 32 ^ c3).bitwise_xor_(k1).bitwise_and_(WORD), p0
        k0, k1 = k0 + WEYL[0], k1 + WEYL[1]
    return c0, c1 & WORD, c2, c3 & WORD
