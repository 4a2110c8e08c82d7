"""Small files that describe huge or thin images are refused before they are decoded; ordinary images are as before."""

import os
import struct
import threading
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import layouts
from limited import read_limited
from tribe import datasets
from tribe.data.datasets import folder as folder_module
from tribe.data.datasets import image_files
from tribe.data.datasets.image_files import ASPECT, PIXELS, SCANS, WEBP_PIXELS, ImageFileError, read_image

COLOURS = {"grey": (0, 1), "colour": (2, 3), "grey with alpha": (4, 2), "colour with alpha": (6, 4)}  # PNG's number


def png(width, height, rows=b"", depth=8, colour=2):
    """A PNG file that says its size; without rows it lacks pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def black(width, height):
    return png(width, height, bytes(1 + 3 * width) * height)


def reason(path, **fields):
    with pytest.raises(ImageFileError, match=f"{path.name} cannot be read as an image: ") as caught:
        read_image(path, **fields)
    return str(caught.value)


# -- thin and huge -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (1, ASPECT + 1)])
def test_a_thin_image_is_not_resized(size, tmp_path):
    (tmp_path / "thin.png").write_bytes(black(*size))
    assert f"sides that differ by a factor of {ASPECT} at most" in reason(tmp_path / "thin.png", resize=224, crop=224)
    assert read_image(tmp_path / "thin.png").shape == (3, size[1], size[0]), "its pixels as they are take little"


def test_the_thinnest_image_is_resized(tmp_path):
    (tmp_path / "a.png").write_bytes(black(2, 2 * ASPECT))
    assert read_image(tmp_path / "a.png", resize=8, crop=8).shape == (3, 8, 8)


def test_the_size_is_checked_before_a_pixel_is_decoded(tmp_path):
    for width, height in ((20_000, 20_000), (PIXELS // 1000 + 1, 1000), (2**31 - 1, 2**31 - 1)):
        (tmp_path / "huge.png").write_bytes(png(width, height))
        assert "pixels" in reason(tmp_path / "huge.png", resize=224)
    (tmp_path / "huge.png").write_bytes(png(PIXELS // 1000, 1000))
    assert "pixels" not in reason(tmp_path / "huge.png"), "this size is decoded, and the pixels are missing"
    (tmp_path / "none.ppm").write_bytes(b"P6\n0 0\n255\n")
    reason(tmp_path / "none.ppm", resize=224)


def test_a_resized_image_has_a_bound_too(tmp_path):
    (tmp_path / "a.png").write_bytes(black(4, 4))
    assert "resized to 9000x9000; expected 64,000,000 at most" in reason(tmp_path / "a.png", resize=9000)


def test_webp_has_a_bound_of_its_own_because_it_takes_more_memory(tmp_path):
    side = int(WEBP_PIXELS**0.5) + 1
    Image.new("L", (side, side)).convert("RGB").save(tmp_path / "a.webp", lossless=True, method=0)
    assert f"expected {WEBP_PIXELS:,} at most" in reason(tmp_path / "a.webp")


def test_a_jpeg_of_many_scans_is_refused(tmp_path):
    """Each scan of a progressive JPEG visits all pixels, and a scan without contents takes a few bytes."""
    layouts.picture(np.random.default_rng(0), 32, 32).save(tmp_path / "a.jpg", progressive=True)
    good = (tmp_path / "a.jpg").read_bytes()
    assert 2 < good.count(b"\xff\xda") < SCANS // 4
    start, end = good.rindex(b"\xff\xda"), good.rindex(b"\xff\xd9")
    (tmp_path / "a.jpg").write_bytes(good[:end] + good[start:end] * SCANS + good[end:])
    assert f"expected {SCANS} at most" in reason(tmp_path / "a.jpg")


def test_other_formats_than_those_of_the_suffixes_are_not_opened(tmp_path):
    """Pillow opens EPS too, for which it starts a program."""
    for kind in ("EPS", "PCX", "TGA"):
        layouts.picture(np.random.default_rng(0), 8, 8).save(tmp_path / "a.png", kind)
        assert "it is none of JPEG, PNG" in reason(tmp_path / "a.png")


def test_too_little_memory_counts_as_damage(tmp_path, monkeypatch):
    (tmp_path / "day").mkdir()
    (tmp_path / "day/a.png").write_bytes(black(8, 8))

    def decode(opened, *others):
        raise MemoryError

    data = datasets.create("folder", root=str(tmp_path), size=8, unreadable="skip")
    monkeypatch.setattr(image_files, "_decode", decode)
    assert reason(tmp_path / "day/a.png").endswith("MemoryError")
    with pytest.warns(UserWarning, match=r"skipped: .*a.png cannot be read as an image: MemoryError"):
        assert data.images("day", torch.arange(1)).isnan().all()


def test_images_that_keep_their_size_have_a_smaller_bound(tmp_path, monkeypatch):
    (tmp_path / "day").mkdir()
    (tmp_path / "day/a.png").write_bytes(black(20, 30))
    monkeypatch.setattr(folder_module, "PIXELS_KEPT", 20 * 30 - 1)
    with pytest.raises(ValueError, match=r"a.png is 20x30 pixels; expected 599 at most without size=: size= "):
        datasets.create("folder", root=str(tmp_path)).images("day", torch.arange(1))
    assert datasets.create("folder", root=str(tmp_path), size=8).images("day", torch.arange(1)).shape == (1, 3, 8, 8)


# -- memory ------------------------------------------------------------------------------------------------------------

PLAY = """
data = datasets.create("folder", root=sys.argv[1], size=224, workers=8, unreadable="skip")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    images = data.images("day", torch.arange(len(data.labels("day"))))
print(int(images.isnan().flatten(1).any(1).sum()), sum("skipped" in str(w.message) for w in caught))
"""
CORRUPT = """
from tribe.data.datasets.image_generation import generate_imagenet
try:
    generate_imagenet(sys.argv[1], out=sys.argv[2], corruptions=["contrast"])
except ValueError as error:
    print(error)
"""


def test_eight_threads_with_huge_and_thin_images_stay_below_a_gigabyte(tmp_path):
    (tmp_path / "day").mkdir()
    for i in range(8):
        (tmp_path / f"day/thin{i}.png").write_bytes(black(1, 20_000))
        (tmp_path / f"day/huge{i}.png").write_bytes(png(20_000, 20_000))
    large = png(7_000, 7_000, bytes(1 + 3 * 7_000) * 7_000)  # 196 MB each, and eight threads
    for i in range(6):
        (tmp_path / f"day/large{i}.png").write_bytes(large)
    assert read_limited(PLAY, tmp_path).split() == ["16", "16"]


def test_a_thin_jpeg_does_not_exhaust_the_memory_of_tribe_corrupt(tmp_path):
    (tmp_path / "val/n01").mkdir(parents=True)
    Image.new("RGB", (1, 60_000)).save(tmp_path / "val/n01/a.JPEG")
    printed = read_limited(CORRUPT, tmp_path / "val", tmp_path / "out")
    assert "a.JPEG cannot be read as an image: it has 1x60000 pixels" in printed


def test_threads_decode_no_more_pixels_at_once_than_the_budget(tmp_path, monkeypatch):
    (tmp_path / "day").mkdir()
    for i in range(24):
        (tmp_path / f"day/{i}.png").write_bytes(black(10 + i % 3, 10))
    lock, now, most = threading.Lock(), 0, 0
    decode = image_files._decode

    def counted(opened, *others):
        nonlocal now, most
        pixels = opened.size[0] * opened.size[1]
        with lock:
            now += pixels
            most = max(most, now)
        try:
            return decode(opened, *others)
        finally:
            with lock:
                now -= pixels

    budget = image_files._PixelBudget(250)
    monkeypatch.setattr(image_files, "_decode", counted)
    monkeypatch.setattr(image_files, "_decoding", budget)
    data = datasets.create("folder", root=str(tmp_path), size=8, workers=8)
    assert data.images("day", torch.arange(24)).shape == (24, 3, 8, 8)
    assert 100 <= most <= 250
    assert budget.free == 250


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_begins_with_the_whole_budget():
    with image_files._decoding.reserve(PIXELS):
        child = os.fork()
        if child == 0:
            os._exit(0 if image_files._decoding.free == PIXELS else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert image_files._decoding.free == PIXELS


# -- 16 bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COLOURS)
def test_colours_of_16_bits_are_reduced_and_grey_is_refused(kind, tmp_path):
    """As the docstring of `read_image` says."""
    colour, channels = COLOURS[kind]
    row = b"\0" + np.full(4 * channels, 40_000, ">u2").tobytes()
    (tmp_path / "deep.png").write_bytes(png(4, 3, row * 3, depth=16, colour=colour))
    if kind == "grey":
        assert "mode I;16, more than eight bits" in reason(tmp_path / "deep.png")
    else:
        assert read_image(tmp_path / "deep.png").unique().tolist() == [40_000 >> 8]
