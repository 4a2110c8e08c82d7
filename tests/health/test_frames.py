"""Faults in images: each is found, no digit and no photo has one, and rows, batches and padding do not matter."""

import math

import numpy as np
import pytest
import torch

from tribe import corruptions
from tribe.core.state import stream
from tribe.data.datasets.files import mnist_test
from tribe.health.frames import FrameRules, Verdict, judge, measure, start_frames

RULES = FrameRules()
SHAPES = (3, 32, 32), (1, 28, 28), (3, 15, 40), (1, 8, 8)


def digits(count, start=0):
    return torch.from_numpy(np.array(mnist_test()[0][start : start + count]))[None, :, None].float() / 255


def photos(count, shape=(3, 32, 32), seed=0):
    """Smooth random pictures with a little noise: (1, count, C, H, W)."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, shape[0], 5, 5, generator=draw)
    fine = torch.nn.functional.interpolate(coarse, size=shape[1:], mode="bilinear")
    return (fine + 0.02 * torch.randn(fine.shape, generator=draw)).clamp(0, 1)[None]


def play(x, valid=None, size=None, state=None, rules=RULES):
    """Judge images in batches of a size: the verdict on all of them, and the last state."""
    valid = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
    state, parts = start_frames(len(x)) if state is None else state, []
    for images, marks in zip(x.split(size or x.shape[1], 1), valid.split(size or x.shape[1], 1), strict=True):
        verdict, state = judge(rules, state, images, marks)
        parts.append(verdict)
    return Verdict(*(torch.cat(t, 1) for t in zip(*parts, strict=True))), state


def found(x, **options):
    """How many images show each fault; faults of none are left out."""
    return {name: int(t.sum()) for name, t in play(x, **options)[0]._asdict().items() if t.any()}


def test_no_digit_has_a_fault():
    assert found(digits(10_000), size=500) == {}


CORRUPTED = {
    "digits": ("fog", "impulse_noise", "glass_blur", "scale", "stripe", "shot_noise"),
    "photos": ("contrast", "fog", "defocus_blur", "gaussian_noise", "impulse_noise", "brightness"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CORRUPTED.items() for name in names])
def test_no_corrupted_image_has_a_fault(kind, name):
    clean = digits(300)[0] if kind == "digits" else photos(100)[0]
    assert found(corruptions.apply(clean, name, 5)[None]) == {}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_black_frame_is_found_at_once_and_a_flat_one_from_the_fourth(shape):
    x = photos(16, shape)
    x[0, 0], x[0, 2:8], x[0, 10:] = 0.0, 1.0, 0.5
    verdict, _ = play(x)
    late = [False] * 5 + [True] * 3 + [False] * 5 + [True] * 3
    assert verdict.black.tolist() == [[True] + [False] * 15]
    assert verdict.flat.tolist() == [late]
    assert verdict.teaches_nothing.tolist() == [[True, *late[1:]]]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_covered_lens_and_pure_noise_are_found_from_the_fourth_frame(shape):
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 40, *shape, generator=draw)
    for x in ((0.02 * noise).clamp(0, 1), torch.rand(noise.shape, generator=draw), 0.5 + 0.1 * noise):
        verdict, _ = play(x)
        assert not verdict.noise[0, :3].any()
        assert verdict.noise[0, 3:].float().mean() > 0.85
        assert verdict.teaches_nothing[0, 3:].float().mean() > 0.85


def test_an_overexposed_frame_with_specks_is_white_after_some_frames():
    x = 1 - 0.5 * (torch.rand(1, 8, 3, 32, 32, generator=torch.Generator().manual_seed(1)) < 0.001)
    assert play(x)[0].white.tolist() == [[False] * 3 + [True] * 5]


@pytest.mark.parametrize(
    ("change", "outside"),
    [
        (lambda x: 255 * x, True),
        (lambda x: (x - 0.45) / 0.25, True),
        (lambda x: x * 1.2 - 0.1, False),
        (lambda x: x * math.nan, True),
    ],
)
def test_values_far_outside_the_range_are_found(change, outside):
    verdict, _ = play(change(photos(20)))
    assert verdict.outside.all() if outside else not verdict.outside.any()


def test_a_frozen_camera_is_found_after_ten_equal_frames_and_freed_by_the_next_one():
    x = torch.cat((photos(1).repeat(1, 15, 1, 1, 1), photos(2, seed=1)), 1)
    for size in (1, 4, 17):
        assert play(x, size=size)[0].frozen.tolist() == [[False] * 10 + [True] * 5 + [False] * 2]


def test_a_still_scene_with_sensor_noise_is_not_frozen():
    draw = torch.Generator().manual_seed(0)
    for shape in ((3, 32, 32), (3, 224, 224), (3, 480, 640)):
        scene = photos(1, shape) + 0.005 * torch.randn(1, 20, *shape, generator=draw)
        assert not play((scene * 255).round() / 255)[0].frozen.any()


def test_lamps_at_night_and_small_digits_are_not_black():
    lamps = torch.zeros(1, 16, 3, 64, 64)
    for i in range(16):
        lamps[0, i, :, 3 * i : 3 * i + 3, 30:33] = 1
    assert found(lamps) == {}
    small = torch.nn.functional.interpolate(digits(16)[0], (14, 14), mode="area")
    assert found(torch.nn.functional.pad(small, (25,) * 4)[None]) == {}


@pytest.mark.parametrize("fine", [lambda i: i[0] % 2, lambda i: i[1] % 2, lambda i: (i[0] + i[1]) % 2])
def test_fine_regular_textures_are_not_noise(fine):
    place = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    levels = torch.linspace(0.3, 0.6, 12).view(1, 12, 1, 1, 1)
    assert found(0.2 + levels * fine(place)) == {}


def test_blur_is_found_but_does_not_stop_learning():
    coarse = torch.rand(60, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bilinear")[None]
    verdict, _ = play(x)
    assert verdict.blurred.tolist() == [[False] * 31 + [True] * 29]
    assert not verdict.teaches_nothing.any()


def mixture():
    """Three streams: each with some faults at its own places."""
    x = torch.cat([photos(40, seed=seed) for seed in range(3)])
    x[0, 5:20] = x[0, 5]
    x[1, 3:9] = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    x[2, 30:] = 0
    return x


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("size", [1, 7])
def test_streams_together_in_one_batch_equal_streams_alone_in_batches_of_any_size(size):
    x = mixture()
    together, end = play(x)
    for i in range(3):
        alone, state = play(x[i : i + 1], size=size)
        assert same(Verdict(*(t[i : i + 1] for t in together)), alone)
        torch.testing.assert_close(stream(end, i, 3), state)


def test_padding_and_images_that_are_not_finite_leave_no_trace():
    x = mixture()
    torch.manual_seed(0)
    real = torch.zeros(3, 80, dtype=torch.bool)
    for row in real:  # forty real images among eighty places
        row[torch.randperm(80)[:40]] = True
    padded = torch.rand(3, 80, 3, 32, 32)
    padded[:, ::3] = math.nan
    padded[real] = x.flatten(0, 1)
    verdict, end = play(padded, valid=real, size=16)
    expected, state = play(x)
    assert same(Verdict(*(t[real].view(3, 40) for t in verdict)), expected)
    assert not any(t[~real].any() for t in verdict)
    torch.testing.assert_close(end, state)


def test_a_frame_that_is_not_finite_keeps_the_last_picture():
    x = photos(3)
    x[0, 1:] = math.nan
    _, state = play(x)
    torch.testing.assert_close(state.last[:, :64], measure(x[:, :1], RULES).picture[:, 0])


def test_inputs_that_are_not_images_are_judged_by_their_values():
    x = torch.rand(1, 20, 30, generator=torch.Generator().manual_seed(0))
    assert found(x) == {}
    assert found(torch.zeros(1, 3, 30)) == {"black": 3}
    assert found(x[:, :1].repeat(1, 12, 1)) == {"frozen": 2}
    assert found(torch.rand(1, 20, 3, 4, 4)) == {}


def test_low_precision_gives_the_same_verdict():
    x = mixture()
    assert same(play(x.bfloat16())[0], play(x.bfloat16().float())[0])
