"""Small files that describe huge or thin images are refused before they are decoded; ordinary images are as before."""

import struct
import zlib

import numpy as np
import pytest
import torch

import layouts
from tribe import datasets
from tribe.data import images as image_files
from tribe.data.images import PIXELS, ImageFileError, read_image

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
    assert "resized to 9000x9000" in reason(tmp_path / "a.png", resize=9000)


def test_other_formats_than_those_of_the_suffixes_are_not_opened(tmp_path):
    """Pillow opens EPS too, for which it starts a program."""
    for kind in ("EPS", "PCX", "TGA"):
        layouts.picture(np.random.default_rng(0), 8, 8).save(tmp_path / "a.png", kind)
        assert "it is none of JPEG, PNG" in reason(tmp_path / "a.png")


def test_too_little_memory_counts_as_damage(tmp_path, monkeypatch):
    (tmp_path / "day").mkdir()
    (tmp_path / "day/a.png").write_bytes(black(8, 8))

    def decode(opened):
        raise MemoryError

    data = datasets.create("folder", root=str(tmp_path), size=8, unreadable="skip")
    monkeypatch.setattr(image_files.np, "array", decode)
    assert reason(tmp_path / "day/a.png").endswith("MemoryError")
    with pytest.warns(UserWarning, match=r"skipped: .*a.png cannot be read as an image: MemoryError"):
        assert data.images("day", torch.arange(1)).isnan().all()


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
