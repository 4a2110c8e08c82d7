"""Videos, written here with PyAV: all frames, one again, and files that end in the middle."""

import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")

import av

from tribe.trial.recordings import open_recording

FRAMES = 50
KINDS = [("mp4", "mpeg4", "yuv420p"), ("mkv", "ffv1", "bgr0"), ("avi", "mjpeg", "yuvj420p")]


def write_video(path, codec, pixels="yuv420p", size=(48, 64), frames=FRAMES):
    """A video in which frame i is as bright as i, with noise."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.bit_rate = 4_000_000
        stream.height, stream.width, stream.pix_fmt = *size, pixels
        for i in range(frames):
            noise = np.random.default_rng(i).integers(0, 50, (*size, 3))
            picture = np.full((*size, 3), 4 * i) + noise
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture.astype(np.uint8), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def played(recording):
    return torch.cat(list(recording.batches(7)))


@pytest.mark.parametrize(("kind", "codec", "pixels"), KINDS)
@pytest.mark.parametrize("every", [1, 3])
def test_all_frames_are_played_in_order_and_can_be_read_again(tmp_path, kind, codec, pixels, every):
    recording = open_recording(write_video(tmp_path / f"v.{kind}", codec, pixels), every=every)
    x = played(recording)
    assert x.shape == (-(-FRAMES // every), 3, 48, 64)
    assert (recording.length, recording.remarks) == (len(x), [])
    brightness = 255 * x.flatten(1).mean(1) - 25
    assert (brightness / 4 - torch.arange(0, FRAMES, every)).abs().max() < 1.5  # codecs lose a little
    assert (brightness.diff() > 0).all()
    for i in (5, 0, len(x) - 1, 7):
        assert torch.equal(recording.fit(recording.frame(i)), x[i])
    assert recording.name(10) == f"0:{every:02}.000"


@pytest.mark.parametrize(("kind", "codec", "pixels"), KINDS[1:])
def test_a_video_that_ends_in_the_middle_is_played_so_far_and_said(tmp_path, kind, codec, pixels):
    path = write_video(tmp_path / f"v.{kind}", codec, pixels)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    recording = open_recording(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = played(recording)
    assert [str(warning.message) for warning in caught] == recording.remarks
    assert 15 < len(x) < 30
    (words,) = [remark for remark in recording.remarks if "ends in the middle" in remark]
    assert f"{len(x)} of" in words
    assert recording.name(len(x) - 1) in words
    assert torch.equal(recording.fit(recording.frame(3)), x[3])


def test_a_video_without_its_index_is_refused_with_advice(tmp_path):
    path = write_video(tmp_path / "v.mp4", "mpeg4")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="cut short"):
        open_recording(path)


def test_a_damaged_part_is_left_out(tmp_path):
    path = write_video(tmp_path / "v.avi", "mjpeg", "yuvj420p")
    content = bytearray(path.read_bytes())
    start = content.index(b"\xff\xd8\xff", len(content) // 2)
    content[start : start + 600] = bytes(600)
    path.write_bytes(content)
    recording = open_recording(path)
    with pytest.warns(UserWarning, match="damaged"):
        x = played(recording)
    assert FRAMES - 3 <= len(x) < FRAMES


@pytest.mark.parametrize("name", ["list.m3u8", "list.ffconcat", "none.mp4"])
def test_a_playlist_opens_no_other_file(tmp_path, name):
    video = write_video(tmp_path / "v.mkv", "ffv1", "bgr0")
    texts = {"list.m3u8": f"#EXTM3U\n#EXTINF:5,\nfile://{video}\n#EXT-X-ENDLIST\n"}
    (tmp_path / name).write_text(texts.get(name, f"ffconcat version 1.0\nfile {video}\n"))
    with pytest.raises(ValueError, match="video"):
        open_recording(tmp_path / name)
