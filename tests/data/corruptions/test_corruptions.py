"""Corruptions: against images made by the benchmark's own generator, and the promises of `apply`.

`tests/data/corruptions.npz` holds 24 CIFAR-10 test images (`clean`), four of them through the deterministic
corruptions, and statistics of all of them through the random ones. Where the full recordings lie beside the repository
(`../shared/goldens`), all severities and the 224-pixel images are compared.
"""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from places import DATA, SHARED
from tribe import corruptions
from tribe.core.rng import Key
from tribe.data.corruptions import common
from tribe.data.scenarios import CIFAR_C, MNIST_C

GOLDENS = SHARED / "goldens"

DETERMINISTIC = ["brightness", "contrast", "defocus_blur", "jpeg_compression", "pixelate", "zoom_blur"]
RANDOM = [name for name in corruptions.names("common") if name not in DETERMINISTIC]
COMMON = sorted(DETERMINISTIC + RANDOM)
FIXED = {*DETERMINISTIC, "mnist/scale", "mnist/brightness", "mnist/stripe", "mnist/canny_edges"}
EVERY = [*COMMON, *(f"mnist/{name}" for name in corruptions.names("mnist"))]
SEVERITIES = (1, 2, 3, 4, 5)
REPEATS = 50  # of each image, for its place among them


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(DATA / "corruptions.npz") as z:
        return {name: z[name] for name in z.files}


def full(name: str) -> dict[str, np.ndarray]:
    path = GOLDENS / name
    if not path.exists():
        pytest.skip(f"the full recordings are not here: {path.name}")
    with np.load(path) as z:
        return {name: z[name] for name in z.files}


def images(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def stored(x: Tensor) -> np.ndarray:
    """As the benchmark stores images: (N, H, W, C) bytes, decimals cut off."""
    return (x * 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def some(n: int = 5, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    """Smooth, colourful images in whole grey levels."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.rand(n, channels, 4, 4, generator=generator)
    x = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic", align_corners=True)
    return (x.clamp(0, 1) * 255).round() / 255


def features(residual: np.ndarray) -> np.ndarray:
    """Mean, log variance and log radial spectrum (7 rings) of residuals (N, H, W, C): (N, 9)."""
    size = residual.shape[1]
    power = np.abs(np.fft.fft2(residual.mean(-1), axes=(1, 2))) ** 2
    k = np.fft.fftfreq(size) * size
    radius = np.hypot(k[:, None], k)
    edges = np.array([0.5, 1.5, 2.5, 4, 6, 9, 13, 30]) * (size / 32)
    rings = [power[:, (radius >= a) & (radius < b)].mean(1) for a, b in pairwise(edges)]
    variance = residual.var((1, 2, 3))
    return np.stack([residual.mean((1, 2, 3)), *(np.log(f + 1e-3) for f in (variance, *rings))], 1)


def ours(x: Tensor, name: str, severity: int, repeats: int) -> np.ndarray:
    """Features of each image, corrupted many times: (repeats, N, 9)."""
    many = x.repeat(repeats, 1, 1, 1)
    y = corruptions.apply(many, name, severity, index=torch.arange(len(many)))
    residual = stored(y).astype(np.float64) - stored(many)
    return features(residual).reshape(repeats, len(x), -1)


def p_values(mine: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Where does each recorded image stand among ours? If both come from one law, anywhere, evenly.

    mine (repeats, N, F), theirs (N, F). The rings of the spectrum are one test, by Bonferroni.
    """
    rank = ((mine < theirs).sum(0) + 0.5 * (mine == theirs).sum(0) + 0.5) / (len(mine) + 1)  # (N, F)
    mean, variance, *rings = (float(stats.kstest(column, "uniform").pvalue) for column in rank.T)
    return {"mean": mean, "variance": variance, "spectrum": min(1.0, len(rings) * min(rings))}


def agreement(y: np.ndarray, recorded: np.ndarray) -> float:
    return float((np.abs(y.astype(int) - recorded) <= 1).mean())


def assert_equal_to_recording(z: dict[str, np.ndarray], name: str, severities: tuple[int, ...]) -> None:
    x = images(z["clean"])
    for severity, expected in zip(severities, z[name], strict=True):
        y = stored(corruptions.apply(x[: len(expected)], name, severity))
        assert agreement(y, expected) >= 0.99, f"severity {severity}"


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_ones_equal_the_recorded_images(name: str, recorded: dict[str, np.ndarray]) -> None:
    assert_equal_to_recording(recorded, name, (1, 3, 5))


@pytest.mark.parametrize("name", RANDOM)
def test_random_ones_follow_the_recorded_law(name: str, recorded: dict[str, np.ndarray]) -> None:
    x = images(recorded["clean"])
    for severity in SEVERITIES:
        p = p_values(ours(x, name, severity, REPEATS), recorded[name][severity - 1])
        assert min(p.values()) > 0.001, f"severity {severity}: {p}"


@pytest.mark.parametrize("name", RANDOM)
def test_the_law_of_another_severity_is_told_apart(name: str, recorded: dict[str, np.ndarray]) -> None:
    """Catches a test without power: parameters a step away must fail it."""
    p = p_values(ours(images(recorded["clean"]), name, 5, REPEATS), recorded[name][2])
    assert min(p.values()) < 0.001, p


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_ones_equal_all_recorded_images(name: str) -> None:
    for file, severities in (("corruptions_cifar10.npz", SEVERITIES), ("corruptions_imagenet.npz", (3, 5))):
        assert_equal_to_recording(full(file), name, severities)


@pytest.mark.parametrize("name", RANDOM)
def test_random_ones_are_near_the_recorded_large_images(name: str) -> None:
    """Two images are too few for a test of laws: the recorded ones must not stand out among ours."""
    z = full("corruptions_imagenet.npz")
    expected = features(z[name][1].astype(np.float64) - z["clean"])
    mine = ours(images(z["clean"]), name, 5, 8)
    score = (expected - mine.mean(0)) / (mine.std(0) + 0.01)
    assert np.abs(score.mean(0)).max() < 5, score


def test_both_benchmarks_have_fifteen() -> None:
    assert corruptions.names("mnist") == list(MNIST_C)
    assert sorted(corruptions.names("common")) == sorted(CIFAR_C)
    assert {f"common/{name}" for name in COMMON} <= set(corruptions.names())


def example(name: str, n: int) -> tuple[str, Tensor]:
    """The name of a corruption in its family, and images for it."""
    family, _, short = name.rpartition("/")
    return short, some(n, 1, 28, 28) if family else some(n)


@pytest.mark.parametrize("name", EVERY)
def test_an_image_does_not_depend_on_its_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, x = example(name, 11)
    index = torch.arange(100, 111)
    together = corruptions.apply(x, short, 5, index=index)
    parts = [corruptions.apply(x[i:j], short, 5, index=index[i:j]) for i, j in ((0, 1), (1, 4), (4, 11))]
    assert torch.equal(torch.cat(parts), together)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    assert torch.equal(corruptions.apply(x[order], short, 5, index=index[order]), together[order])
    monkeypatch.setitem(corruptions.CHUNK, "cpu", 2 * x[0].numel())
    assert torch.equal(corruptions.apply(x, short, 5, index=index), together)


@pytest.mark.parametrize("name", EVERY)
def test_seed_and_index_matter_to_what_is_random_and_to_nothing_else(name: str) -> None:
    short, x = example(name, 1)
    x = x.expand(64, *x.shape[1:])
    y = corruptions.apply(x, short, 4)
    assert torch.equal(y, corruptions.apply(x, short, 4, seed=0, index=torch.arange(64)))
    assert torch.equal(y, corruptions.apply(x, short, 4, seed=1)) == (name in FIXED)
    assert torch.equal(y, y[:1].expand_as(y)) == (name in FIXED)
    severities_are_alike = name in FIXED and name.startswith("mnist/")
    assert torch.equal(y, corruptions.apply(x, short, 5)) == severities_are_alike


@pytest.mark.parametrize("name", COMMON)
def test_a_higher_severity_changes_more(name: str, recorded: dict[str, np.ndarray]) -> None:
    """Catches a table in the wrong order; some of the benchmark's do not rise at every step."""
    rising = [*DETERMINISTIC, "fog", "gaussian_noise", "impulse_noise", "motion_blur", "shot_noise"]
    severities = SEVERITIES if name in rising else (1, 5)
    x = images(recorded["clean"]).repeat(8, 1, 1, 1)
    distance = [(corruptions.apply(x, name, s) - x).abs().mean().item() for s in severities]
    falling = name == "elastic_transform"  # which begins with its largest move
    assert distance == sorted(distance, reverse=falling), distance


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *product(COMMON, [(1, 32, 32), (4, 17, 23), (3, 70, 40), (3, 100, 130), (3, 3, 3)]),
        *((name, (1, 28, 28)) for name in EVERY if name.startswith("mnist/")),
    ],
)
def test_any_shape_comes_back_in_range(name: str, shape: tuple[int, int, int]) -> None:
    x = torch.cat((some(2, *shape), torch.zeros(1, *shape), torch.ones(1, *shape)))
    before = x.clone()
    for severity in (1, 5):
        y = corruptions.apply(x, name.rpartition("/")[2], severity)
        assert y.shape == x.shape
        assert y.isfinite().all()
        assert 0 <= y.min() <= y.max() <= 1
        assert shape == (3, 3, 3) or not torch.equal(y, x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", EVERY)
def test_any_dtype_and_layout_comes_back(name: str) -> None:
    short, x = example(name, 2)
    y = corruptions.apply(x, short, 3)
    double = corruptions.apply(x.double(), short, 3)
    assert double.dtype == torch.float64
    assert torch.equal(double.float(), y)
    assert corruptions.apply(x.bfloat16(), short, 3).dtype == torch.bfloat16
    assert torch.equal(corruptions.apply(x.contiguous(memory_format=torch.channels_last), short, 3), y)
    assert corruptions.apply(x[:0], short, 3).shape == (0, *x.shape[1:])


def test_params_replace_the_table_which_is_another_for_large_images() -> None:
    for x, name, params in (
        (some(2), "contrast", 0.15),
        (some(2), "defocus_blur", (1.5, 0.1)),
        (some(1, 3, 100, 100), "contrast", 0.05),
        (some(1, 3, 99, 120), "contrast", 0.15),
    ):
        assert torch.equal(corruptions.apply(x, name, 1, params=params), corruptions.apply(x, name, 5))


def test_shot_noise_has_its_law_between_grey_levels() -> None:
    """Mean and variance of Poisson(c x) / c are x and x / c; x is rounded, but to much less than a grey level."""
    rounding = 1 / (2 * 255 * common.FINE)
    for value, c in ((0.0, 400.0), (0.0031, 400.0), (0.2, 400.0), (0.5013, 60.0), (1.0, 3.0)):
        x = torch.full((64, 1, 64, 64), value)
        draw = corruptions.Draw(Key(torch.zeros(64, dtype=torch.int64), torch.arange(64)), "test")
        y = common.shot_noise(x, (c,), draw).double()
        assert abs(y.mean().item() - value) <= 5 * (value / c / x.numel()) ** 0.5 + rounding
        assert y.var().item() == pytest.approx(value / c, rel=0.03, abs=rounding / c)


def test_small_digits_are_of_the_other_family() -> None:
    x = some(2, 1, 28, 28)
    with pytest.raises(ValueError, match="mnist"):
        corruptions.apply(x, "gaussian_noise", 3)
    assert corruptions.apply(x, "gaussian_noise", 3, family="common").shape == x.shape


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"name": "gausian_noise"}, ValueError, "did you mean 'gaussian_noise'"),
        ({"family": "comon"}, ValueError, "did you mean 'common'"),
        ({"severity": 0}, ValueError, "a severity is 1, 2, 3, 4 or 5; got 0"),
        ({"severity": 6}, ValueError, "got 6"),
        ({"severity": "3"}, ValueError, "got '3'"),
        ({"images": torch.zeros(3, 32, 32)}, ValueError, r"got shape \(3, 32, 32\)"),
        ({"images": torch.rand(2, 3, 28, 28), "family": "mnist"}, ValueError, "one channel"),
        ({"images": torch.zeros(1, 3, 32, 32, dtype=torch.uint8)}, TypeError, "divide uint8 images by 255"),
        ({"images": torch.full((1, 3, 32, 32), 255.0)}, ValueError, r"lie in \[0, 1\]; got values from 255"),
        ({"images": torch.full((1, 3, 32, 32), torch.nan)}, ValueError, r"lie in \[0, 1\]"),
        ({"index": torch.arange(4)}, ValueError, "index must hold 2 integers"),
        ({"index": torch.zeros(2)}, ValueError, "index must hold 2 integers"),
    ],
)
def test_wrong_arguments_are_refused_in_words(change: dict[str, object], error: type[Exception], words: str) -> None:
    arguments = {"images": some(2), "name": "fog", "severity": 3} | change
    with pytest.raises(error, match=words):
        corruptions.apply(**arguments)  # type: ignore[arg-type]


def test_tables_have_an_entry_a_severity() -> None:
    with pytest.raises(ValueError, match="has 2 entries; expected 1, or one per severity"):
        corruptions.corruption("half", family="common", table=(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "size"), [*product(COMMON, (32, 224)), *((name, 28) for name in EVERY[15:])])
def test_gpus_agree(name: str, size: int) -> None:
    name, x = name.rpartition("/")[2], some(16, 1 if size == 28 else 3, size, size)
    for severity in (1, 5):
        y = stored(corruptions.apply(x, name, severity))
        z = stored(corruptions.apply(x.cuda(), name, severity).cpu())
        assert agreement(z, y) >= 0.999, f"severity {severity}"
