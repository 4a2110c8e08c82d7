"""The generator equals the published vectors, passes the usual tests of randomness, and depends on its key alone."""

import numpy as np
import pytest
import torch
from scipy import stats

from tribe.core import rng
from tribe.core.rng import Key

WORD = 0xFFFFFFFF
VECTORS = [  # Random123's known answers for philox4x32-10: counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def make_key(seeds, clocks):
    return Key(torch.tensor(seeds, dtype=torch.int64), torch.tensor(clocks, dtype=torch.int64))


def slow_philox(counter, key):
    """Philox4x32-10 in Python's unbounded integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & WORD, p0 >> 32 ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_known_answers(counter, key, words):
    as_tensors = [torch.tensor([[w]]) for w in (*counter, *key)]
    assert tuple(int(w) for w in rng._philox(tuple(as_tensors[:4]), tuple(as_tensors[4:]))) == words
    assert slow_philox(counter, key) == words


@pytest.mark.parametrize("seed", [0, 425, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF])
@pytest.mark.parametrize("clock", [0, 7, 2**40 + 3, -5])
def test_words_are_philox_of_block_clock_and_purpose_under_the_seed(seed, clock):
    purpose, n = 0xDEADBEEF, 11
    expected = [
        word
        for block in range(3)
        for word in slow_philox((block, clock & WORD, clock >> 32 & WORD, purpose), (seed & WORD, seed >> 32 & WORD))
    ]
    assert rng.bits(make_key([seed], [clock]), purpose, n)[0].tolist() == expected[:n]


@pytest.mark.parametrize("draw", [rng.uniform, rng.normal])
def test_rows_together_equal_each_alone(draw):
    """Bit for bit, at sizes where a vector register or a thread's share ends at another position."""
    generator = np.random.default_rng(0)
    for n in [1, 2, 3, 5, 13, 17, 31, 63, 257, 1001, 70001]:
        seeds, clocks = generator.integers(-(2**63), 2**63, (2, 3)).tolist()
        together = draw(make_key(seeds, clocks), 3, (n,))
        for row in range(3):
            alone = draw(make_key([seeds[row]], [clocks[row]]), 3, (n,))
            assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("draw", [rng.uniform, rng.normal])
def test_a_longer_draw_begins_with_a_shorter_one(draw):
    key = make_key([1, 2], [3, 4])
    long = draw(key, 5, (1009,))
    for n in [0, 1, 2, 3, 4, 5, 6, 7, 100, 1001]:
        assert torch.equal(draw(key, 5, (n,)), long[:, :n])


def test_shape_dtype_and_empty_draws():
    key = make_key([1, 2], [3, 4])
    assert rng.bits(key, 0, 5).shape == (2, 5)
    assert rng.bits(key, 0, 5).dtype == torch.int64
    for draw in (rng.uniform, rng.normal):
        assert draw(key, 0, (3, 4, 5)).shape == (2, 3, 4, 5)
        assert draw(key, 0, (3, 4, 5)).dtype == torch.float32
        assert draw(key, 0, ()).shape == (2,)
        assert draw(key, 0, (3, 0)).shape == (2, 3, 0)
        assert draw(make_key([], []), 0, (3,)).shape == (0, 3)


def test_uniform_is_uniform():
    u = rng.uniform(make_key([11], [0]), 1, (200_000,))[0].double().numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.kstest(u[::4], "uniform").pvalue > 1e-3  # a word of the block by itself


def test_normal_is_normal():
    z = rng.normal(make_key([12], [0]), 1, (200_000,))[0].double().numpy()
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert stats.kstest(np.abs(z[::2] + 1j * z[1::2]), "rayleigh").pvalue > 1e-3  # the two of a pair
    assert abs(stats.kurtosis(z)) < 5 * np.sqrt(24 / z.size)
    for lag in (1, 2, 3, 4):  # all four words of a block are used, and none twice
        assert abs(np.corrcoef(z[:-lag], z[lag:])[0, 1]) < 4.5 / np.sqrt(z.size)
        assert abs(np.corrcoef(z[:-lag] ** 2, z[lag:] ** 2)[0, 1]) < 4.5 / np.sqrt(z.size)


@pytest.mark.parametrize("word", [0, 1, WORD])
def test_extreme_words_give_finite_normals_and_uniforms_below_one(monkeypatch, word):
    monkeypatch.setattr(rng, "_words", lambda key, purpose, n: tuple(torch.full((1, 2), word) for _ in range(4)))
    assert rng.normal(make_key([0], [0]), 0, (8,)).isfinite().all()
    assert 0 <= float(rng.uniform(make_key([0], [0]), 0, (8,)).max()) < 1


def test_neighbouring_seeds_clocks_and_purposes_are_independent():
    n, draws = 20_000, []
    for seed in (0, 1, 2**32):
        for clock in (0, 1, 2**32):
            draws += [rng.uniform(make_key([seed], [clock]), purpose, (n,))[0] for purpose in (0, 1)]
    rows = torch.stack(draws).double().numpy()
    off_diagonal = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(n)
    assert np.abs(off_diagonal).max() > 1e-4  # of random numbers, not of constants
    # And across keys at one position, as a stream's parameters are drawn: one number a step.
    for key in (make_key(range(n), [0] * n), make_key([7] * n, range(n))):
        first = rng.uniform(key, 2, (1,))[:, 0].double().numpy()
        assert stats.kstest(first, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 4 / np.sqrt(n)


def test_reads_no_values():
    """On the meta device there is no value to read: what runs there does not synchronise with the host."""
    key = Key(*(t.to("meta") for t in make_key([1, 2], [3, 4])))
    assert rng.normal(key, 0, (5, 3)).shape == rng.uniform(key, 0, (5, 3)).shape == (2, 5, 3)


@pytest.mark.gpu
def test_same_numbers_on_cpu_and_gpu():
    key = make_key([1, -2, 2**60], [3, 4, 2**50])
    there = Key(*(t.cuda() for t in key))
    assert torch.equal(rng.bits(there, 9, 10_001).cpu(), rng.bits(key, 9, 10_001))
    assert torch.equal(rng.uniform(there, 9, (10_001,)).cpu(), rng.uniform(key, 9, (10_001,)))
    torch.testing.assert_close(rng.normal(there, 9, (10_001,)).cpu(), rng.normal(key, 9, (10_001,)), rtol=0, atol=1e-5)
