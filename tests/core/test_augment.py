"""The augmentation, against slow loops over pixels written from its definition, and against its distributions."""

import colorsys
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from tribe.core import augment, rng
from tribe.core.augment import Augment, Params
from tribe.core.rng import Key

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
DTYPES = list(TOLERANCE)
SIZES = [(7, 9), (8, 8), (12, 12), (9, 6), (3, 3), (2, 2), (2, 3), (1, 1), (1, 8), (3, 30), (31, 4)]
NOTHING = {
    **dict.fromkeys(["brightness", "contrast", "saturation", "gamma", "scale"], (1.0, 1.0)),
    **dict.fromkeys(["hue", "rotation", "translation"], (0.0, 0.0)),
    "sigma": (1e-3, 1e-3),
    "flip": 0.0,
    "noise": 0.0,
}


def make_key(streams, start=0):
    return Key(torch.arange(streams) * 1_000_003 + start, torch.arange(streams) % 5)


def pictures(shape, dtype=torch.float64, seed=0):
    """Random images with hard cases for colour operations: black, white, grey, ties, and values outside [0, 1]."""
    x = torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * 1.2 - 0.1
    flat = x.flatten(3)  # (S, B, C, H W)
    for i, colour in enumerate([[0.0] * 3, [1.0] * 3, [0.4] * 3, [0.7, 0.7, 0.2], [0.1, 0.8, 0.8], [0.5, 0.2, 0.5]]):
        if 2 * i + 1 < flat.shape[-1]:
            flat[..., 2 * i + 1] = torch.tensor((colour * 2)[: shape[2]], dtype=dtype)
    return x


# --- the definition, one image (C, H, W) in float64 at a time ---------------------------------------------------------


def slow_grey(image):
    if len(image) == 3:
        return 0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2]
    return sum(image) / len(image)


def slow_brightness(image, f):
    return np.clip(image * f, 0, 1)


def slow_contrast(image, f):
    return np.clip(f * image + (1 - f) * slow_grey(image).mean(), 0, 1)


def slow_saturation(image, f):
    return image if len(image) == 1 else np.clip(f * image + (1 - f) * slow_grey(image), 0, 1)


def slow_hue(image, f):
    if len(image) != 3:
        return image
    out = image.copy()
    for i, j in np.ndindex(image.shape[1:]):
        h, s, v = colorsys.rgb_to_hsv(*image[:, i, j])
        out[:, i, j] = colorsys.hsv_to_rgb((h + f) % 1, s, v)
    return out


def slow_gamma(image, f):
    return np.clip(image, 1e-8, 1) ** f


SLOW = [slow_brightness, slow_contrast, slow_saturation, slow_hue, slow_gamma]


def slow_pad(image):
    height, width = image.shape[1:]
    return np.pad(image, ((0, 0), (int(height / 2),) * 2, (int(width / 2),) * 2), mode="edge")


def slow_crop(image, height, width):
    top, left = (image.shape[1] - height) // 2, (image.shape[2] - width) // 2
    return image[:, top : top + height, left : left + width]


def slow_affine(image, degrees, dx, dy, scale):
    """Rotate and scale about the centre, then translate; bilinear, zeros outside."""
    height, width = image.shape[1:]
    angle, out = math.radians(degrees), np.zeros_like(image)
    for i, j in np.ndindex(height, width):
        x, y = j - (width - 1) / 2 - dx, i - (height - 1) / 2 - dy
        column = (math.cos(angle) * x + math.sin(angle) * y) / scale + (width - 1) / 2
        row = (-math.sin(angle) * x + math.cos(angle) * y) / scale + (height - 1) / 2
        top, left = math.floor(row), math.floor(column)
        for r, c in itertools.product((top, top + 1), (left, left + 1)):
            if 0 <= r < height and 0 <= c < width:
                out[:, i, j] += image[:, r, c] * (1 - abs(row - r)) * (1 - abs(column - c))
    return out


def slow_blur(image, sigma):
    taps = np.array([math.exp(-(t**2) / (2 * sigma**2)) for t in range(-2, 3)])
    taps /= taps.sum()

    def reflect(i, n):
        return 0 if n == 1 else -i if i < 0 else 2 * (n - 1) - i if i >= n else i

    height, width = image.shape[1:]
    rows = np.zeros_like(image)
    for i, t in itertools.product(range(height), range(5)):
        rows[:, i] += taps[t] * image[:, reflect(i + t - 2, height)]
    out = np.zeros_like(image)
    for j, t in itertools.product(range(width), range(5)):
        out[:, :, j] += taps[t] * rows[:, :, reflect(j + t - 2, width)]
    return out


def slow_augment(x, params, noise):
    """Everything, for x (S, B, C, H, W)."""
    out = np.zeros(x.shape)
    z = rng.normal(params.key, augment.NOISE, x.shape[1:]).double().numpy()
    for s, b in np.ndindex(x.shape[:2]):
        order, *p = (t[s, b if t.shape[1] > 1 else 0].tolist() for t in params[:-1])
        image = np.clip(x[s, b].double().numpy(), 0, 1)
        for i in order:
            image = SLOW[i](image, p[i])
        rotation, dx, dy, scale, sigma, flip = p[5:]
        image = slow_crop(slow_blur(slow_affine(slow_pad(image), rotation, dx, dy, scale), sigma), *x.shape[3:])
        image = image[:, :, ::-1] if flip else image
        out[s, b] = np.clip(image + noise * z[s, b], 0, 1)
    return out


def assert_close(fast, slow, dtype):
    assert fast.dtype == dtype
    assert np.abs(fast.double().numpy() - slow).max() <= TOLERANCE[dtype]


# --- each operation alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("operation", range(5))
def test_colour_operation_equals_the_loop(operation, channels, dtype):
    strengths = [(0.6, 1.4, 1.0), (0.7, 1.3, 0.0), (0.5, 1.5, 0.0), (-0.06, 0.06, 0.5), (0.7, 1.3, 1.0)][operation]
    x = pictures((3, 2, channels, 7, 9), dtype).clamp(0, 1)
    before = x.clone()
    f = torch.tensor(strengths, dtype=dtype)
    fast = augment.OPERATIONS[operation](x, f.view(-1, 1, 1, 1, 1))
    slow = np.zeros(x.shape)
    for s, b in np.ndindex(3, 2):
        slow[s, b] = SLOW[operation](x[s, b].double().numpy(), float(f[s]))
    assert_close(fast, slow, dtype)
    assert torch.equal(x, before)
    inert = operation in {1: (2, 3), 3: ()}.get(channels, (3,))  # no saturation on one channel, hue only on three
    assert torch.equal(fast, x) == inert  # the strengths are strong enough to show


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "opened",
    [
        {"rotation": (-15.0, 15.0)},
        {"translation": (-0.4, 0.4)},  # far enough to meet the zeros
        {"scale": (0.4, 1.6)},
        {"rotation": (-90.0, 90.0), "translation": (-0.2, 0.2), "scale": (0.5, 1.5)},
        {"sigma": (0.3, 2.0)},  # wide, so that the outer taps and the reflection count
    ],
    ids=lambda opened: "+".join(opened),
)
def test_affine_or_blur_alone_equals_the_loop(opened, size, dtype):
    transform = Augment(**NOTHING | opened)
    x = pictures((4, 1, 3, *size), dtype).clamp(0.01, 0.99)
    params = transform.sample(make_key(4), x.shape)
    slow = np.zeros(x.shape)
    for s in range(4):
        moved, *p = (float(t[s, 0]) for t in (params.sigma, params.rotation, params.dx, params.dy, params.scale))
        padded = slow_pad(x[s, 0].double().numpy())
        slow[s, 0] = slow_crop(slow_blur(padded, moved) if "sigma" in opened else slow_affine(padded, *p), *size)
    assert_close(transform.apply(x, params), slow, dtype)


def test_noise_alone_is_white_with_the_given_deviation():
    x = torch.full((2, 4, 3, 16, 16), 0.5)
    noise = (Augment(**NOTHING | {"noise": 0.01})(x, make_key(2)) - x).double()
    assert stats.kstest(noise.flatten().numpy() / 0.01, "norm").pvalue > 1e-3
    rows = noise.reshape(24, 256).numpy()  # every stream, image and channel has other noise
    assert np.abs(np.corrcoef(rows)[np.triu_indices(24, 1)]).max() < 4.5 / math.sqrt(256)
    default = (Augment(**NOTHING | {"noise": Augment().noise})(x, make_key(2)) - x).std()
    assert abs(float(default) - 0.005) < 1e-4
    assert augment.NOISE != augment.PARAMETERS  # or the first pixels would be the parameters in another form


# --- the whole chain --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", ["batch", "image"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_whole_chain_equals_the_loop(size, channels, per, dtype):
    transform = Augment(per=per)
    x = pictures((3, 2, channels, *size), dtype, seed=sum(size))
    params = transform.sample(make_key(3, start=sum(size)), x.shape)
    assert_close(transform.apply(x, params), slow_augment(x, params, 0.005), dtype)


@pytest.mark.parametrize("per", ["batch", "image"])
def test_the_path_that_reads_no_values_gives_the_same(monkeypatch, per):
    x, key = pictures((5, 3, 3, 8, 6)), make_key(5)
    read = Augment(per=per)(x, key)
    monkeypatch.setattr(augment, "_readable", lambda x: False)
    torch.testing.assert_close(Augment(per=per)(x, key), read, rtol=0, atol=1e-12)


def test_reads_no_values_off_the_cpu():
    """On the meta device there is no value to read: what runs there needs no host synchronisation."""
    key = Key(*(t.to("meta") for t in make_key(2)))
    assert Augment(per="image")(torch.empty(2, 3, 3, 8, 8, device="meta"), key).shape == (2, 3, 3, 8, 8)


# --- who shares what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["batch", "image"])
@pytest.mark.parametrize(
    "shape",
    [(3, 2, 3, 9, 7), (4, 5, 1, 5, 5), (2, 3, 4, 11, 6), (3, 64, 3, 32, 32), (3, 5, 3, 67, 67), (2, 1, 3, 225, 225)],
)
def test_streams_together_equal_each_alone(shape, per):
    """Bit for bit: results must not depend on the position of a pixel in the tensor, or on the number of streams."""
    x, key = pictures(shape, torch.float32), make_key(shape[0])
    together = Augment(per=per)(x, key)
    for s in range(shape[0]):
        alone = Augment(per=per)(x[s : s + 1], Key(key.seed[s : s + 1], key.clock[s : s + 1]))
        assert torch.equal(together[s], alone[0])


@pytest.mark.parametrize("operation", range(5))
def test_colour_operation_together_equals_alone(operation):
    """Bit for bit, where all streams are due at once; catches `pow`, and a sum that threads divide."""
    x, f = pictures((5, 1, 3, 201, 199), torch.float32).clamp(0, 1), torch.linspace(0.1, 1.3, 5).view(5, 1, 1, 1, 1)
    together = augment.OPERATIONS[operation](x, f)
    for s in range(5):
        assert torch.equal(together[s : s + 1], augment.OPERATIONS[operation](x[s : s + 1], f[s : s + 1]))


def test_a_batch_shares_parameters_or_every_image_has_its_own():
    x, key = pictures((1, 1, 3, 8, 8)).expand(1, 4, -1, -1, -1), make_key(1)
    shared, own = (Augment(per=per, noise=0.0)(x, key)[0] for per in ("batch", "image"))
    assert torch.equal(shared[0], shared[1])
    assert all(not torch.allclose(own[i], own[j], atol=0.02) for i, j in itertools.combinations(range(4), 2))
    assert all(t.shape[:2] == (1, 1) for t in Augment().sample(key, x.shape)[:-1])
    assert all(t.shape[:2] == (1, 4) for t in Augment(per="image").sample(key, x.shape)[:-1])


def test_replay_is_exact_and_touches_nothing():
    transform, x, key = Augment(per="image"), pictures((2, 3, 3, 8, 8)), make_key(2)
    params, before = transform.sample(key, x.shape), x.clone()
    first, state = transform.apply(x, params), torch.get_rng_state()
    kept = Params(*(t.clone() for t in params[:-1]), params.key)
    assert torch.equal(transform.apply(x, params), first)
    assert torch.equal(transform(x, key), first)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(params[:-1], kept[:-1], strict=True))


# --- distributions ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["batch", "image"])
def drawn(request):
    """12,000 sets of parameters, for images of 16 x 32: over streams, or over the images of one stream."""
    streams, batch = (12_000, 1) if request.param == "batch" else (1, 12_000)
    params = Augment(per=request.param).sample(make_key(streams), (streams, batch, 3, 16, 32))
    return Params(*(t.flatten(0, 1).numpy() for t in params[:-1]), params.key)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("brightness", 0.6, 1.4),
        ("contrast", 0.7, 1.3),
        ("saturation", 0.5, 1.5),
        ("hue", -0.06, 0.06),
        ("gamma", 0.7, 1.3),
        ("rotation", -15, 15),
        ("scale", 0.9, 1.1),
        ("sigma", 0.001, 0.5),
    ],
)
def test_parameter_is_uniform_on_its_range(drawn, name, low, high):
    assert stats.kstest(getattr(drawn, name).astype(float), "uniform", (low, high - low)).pvalue > 1e-3


@pytest.mark.parametrize(("name", "most"), [("dx", 4), ("dy", 2)])  # a sixteenth of 64 columns, of 32 rows
def test_translation_is_a_rounded_uniform(drawn, name, most):
    values, counts = np.unique(getattr(drawn, name), return_counts=True)
    assert values.tolist() == list(range(-most, most + 1))
    share = np.where(np.abs(values) == most, 0.5, 1.0) / (2 * most)
    assert stats.chisquare(counts, share * counts.sum()).pvalue > 1e-3


def test_order_is_uniform_over_all_120(drawn):
    orders, counts = np.unique(drawn.order, axis=0, return_counts=True)
    assert len(orders) == 120
    assert (np.sort(orders, axis=1) == np.arange(5)).all()
    assert stats.chisquare(counts).pvalue > 1e-3


def test_flip_is_a_fair_coin(drawn):
    assert stats.binomtest(int(drawn.flip.sum()), len(drawn.flip)).pvalue > 1e-3
    biased = Augment(flip=0.25).sample(make_key(12_000), (12_000, 1, 3, 4, 4)).flip
    assert stats.binomtest(int(biased.sum()), 12_000, 0.25).pvalue > 1e-3


def test_parameters_are_independent_of_each_other_and_of_their_neighbours(drawn):
    table = np.stack([*drawn.order.T[:4], *drawn[1:-1]]).astype(float)
    n = table.shape[1]
    correlation = np.corrcoef(table)
    correlation[:4, :4] = 0  # the places of one order exclude each other
    assert np.abs(correlation[np.triu_indices(len(table), 1)]).max() < 4.5 / math.sqrt(n)
    for row in table:
        assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 4.5 / math.sqrt(n)


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    x, key = pictures((1, 2, 3, 8, 8)).to(dtype), make_key(1)
    assert torch.equal(Augment()(x, key), Augment()(x.float(), key).to(dtype))


def test_memory_layout_does_not_matter():
    x, key = pictures((2, 3, 3, 8, 6)), make_key(2)
    assert torch.equal(Augment()(x.transpose(3, 4).contiguous().transpose(3, 4), key), Augment()(x, key))


@pytest.mark.parametrize("per", ["batch", "image"])
def test_an_empty_batch_stays_empty(per):
    x = torch.rand(2, 0, 3, 8, 8)
    assert Augment(per=per)(x, make_key(2)).shape == x.shape


def test_result_is_an_image_without_a_graph():
    y = Augment(noise=0.5)(pictures((2, 3, 3, 8, 8)).requires_grad_(), make_key(2))
    assert not y.requires_grad
    assert y.min() == 0
    assert y.max() == 1


def test_wrong_inputs_are_refused():
    key = make_key(1)
    for call in (Augment(), lambda x, key: Augment().apply(x, Augment().sample(key, (1, 2, 3, 8, 8)))):
        with pytest.raises(ValueError, match="channels"):
            call(torch.rand(2, 3, 8, 8), key)
        with pytest.raises(TypeError, match=r"floating-point.*uint8.*augment="):
            call(torch.zeros(1, 2, 3, 8, 8, dtype=torch.uint8), key)
    with pytest.raises(ValueError, match="streams"):
        Augment()(torch.rand(2, 2, 3, 8, 8), key)
    with pytest.raises(ValueError, match="do not fit"):
        Augment().apply(torch.rand(1, 3, 3, 8, 8), Augment(per="image").sample(key, (1, 2, 3, 8, 8)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("per", "pixel"),
        ("hue", (0.1, -0.1)),
        ("scale", (0.0, 1.0)),
        ("sigma", (0.0, 1.0)),
        ("flip", 1.5),
        ("noise", -1),
    ],
)
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Augment(**{field: value})


# --- another device ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("per", ["batch", "image"])
@pytest.mark.parametrize("size", [(32, 32), (7, 9), (3, 30)])
def test_same_picture_on_cpu_and_gpu(size, per):
    x, key = pictures((3, 4, 3, *size), torch.float32), make_key(3)
    there = Augment(per=per)(x.cuda(), Key(*(t.cuda() for t in key)))
    torch.testing.assert_close(there.cpu(), Augment(per=per)(x, key), rtol=0, atol=2e-5)
