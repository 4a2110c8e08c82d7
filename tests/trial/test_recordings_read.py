"""Recordings of all kinds give the same frames, in order; what cannot be played is said in words."""

import numpy as np
import pytest
import torch

from tribe.trial.recordings import open_recording

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)


def write_pictures(folder, pixels=PIXELS):
    folder.mkdir(exist_ok=True)
    for i, frame in enumerate(pixels):
        Image.fromarray(frame).save(folder / f"frame{i}.png")  # frame10 comes after frame9
    return folder


def played(recording, batch=5):
    return torch.cat(list(recording.batches(batch)))


def places(folder):
    """The same frames as a folder, lists and arrays."""
    pictures = write_pictures(folder / "pictures")
    names = [f"pictures/frame{i}.png" for i in range(len(PIXELS))]
    (folder / "list.txt").write_text("\n".join(names) + "\n")
    (folder / "list.csv").write_text("file,weather\n" + "".join(f"{name},fog\n" for name in names))
    np.save(folder / "last.npy", PIXELS)
    np.save(folder / "first.npy", PIXELS.transpose(0, 3, 1, 2))
    np.savez(folder / "frames.npz", images=PIXELS, labels=np.arange(12))
    files = ("list.txt", "list.csv", "last.npy", "first.npy", "frames.npz")
    return [pictures, *(folder / name for name in files)]


def test_all_kinds_give_the_same_frames_in_order(tmp_path):
    expected = torch.from_numpy(PIXELS).permute(0, 3, 1, 2).float() / 255
    for place in places(tmp_path):
        for every in (1, 5):
            recording = open_recording(place, every=every)
            x = played(recording)
            assert torch.equal(x, expected[::every]), place
            assert recording.length == len(x)
            assert torch.equal(recording.fit(recording.frame(1)), x[1])
    assert open_recording(tmp_path / "pictures").name(10) == "frame10.png"


def test_a_batch_is_read_at_a_time(tmp_path):
    (tmp_path / "list.txt").write_text("\n".join(["one.png"] * 5000))
    Image.fromarray(PIXELS[0]).save(tmp_path / "one.png")
    batches = open_recording(tmp_path / "list.txt").batches(4)
    assert len(next(batches)) == 4
    (tmp_path / "one.png").unlink()  # a few frames are read ahead, not thousands
    with pytest.raises(ValueError, match="cannot"):
        list(batches)


def test_the_same_frames_are_recognised_and_others_are_not(tmp_path):
    for place in places(tmp_path):
        known = open_recording(place).digest()
        assert known == open_recording(place).digest()
        assert known != open_recording(place, every=2).digest()
    (tmp_path / "pictures/frame3.png").write_bytes(b"other")
    assert open_recording(tmp_path / "pictures").digest() != open_recording(tmp_path / "list.txt").digest()


def test_frames_are_resized_and_cut_or_stretched(tmp_path):
    wide = np.zeros((2, 20, 40, 3), np.uint8)
    wide[:, :, 10:30] = 255  # the middle half is white
    np.save(tmp_path / "wide.npy", wide)
    cut = played(open_recording(tmp_path / "wide.npy", size=(10, 10)))
    assert cut.shape == (2, 3, 10, 10)
    assert cut.min() > 0.8
    whole = played(open_recording(tmp_path / "wide.npy", size=(10, 10), stretch=True))
    assert whole.shape == (2, 3, 10, 10)
    assert whole.mean().item() == pytest.approx(0.5, abs=0.02)
    grey = played(open_recording(tmp_path / "wide.npy", size=(10, 20), shape=(1, 10, 20)))
    assert grey.shape == (2, 1, 10, 20)


def test_grey_frames_become_three_channels(tmp_path):
    np.save(tmp_path / "grey.npy", PIXELS[..., 0])
    x = played(open_recording(tmp_path / "grey.npy", shape=(3, None, None)))
    assert x.shape == (12, 3, 6, 8)
    assert torch.equal(x[:, 0], x[:, 2])


def test_a_frame_of_another_size_is_named_with_both_sizes(tmp_path):
    folder = write_pictures(tmp_path / "pictures")
    Image.fromarray(PIXELS[0, :4]).save(folder / "frame7.png")
    with pytest.raises(ValueError, match="size") as caught:
        played(open_recording(folder))
    for words in ("frame 7 (frame7.png)", "4x8", "6x8", "--size"):
        assert words in str(caught.value)
    assert played(open_recording(folder, size=(4, 4))).shape == (12, 3, 4, 4)


def test_frames_that_the_network_does_not_take_are_refused_before_any_is_played(tmp_path):
    folder = write_pictures(tmp_path / "pictures")
    with pytest.raises(ValueError, match="28x28") as caught:
        next(open_recording(folder, shape=(1, 28, 28)).batches(3))
    assert "6x8" in str(caught.value)
    with pytest.raises(ValueError, match="channels"):
        next(open_recording(folder, shape=(4, None, None)).batches(3))


@pytest.mark.parametrize("broken", [0, 7])
def test_an_unreadable_picture_is_named_or_left_out(tmp_path, broken):
    folder = write_pictures(tmp_path / "pictures")
    (folder / f"frame{broken}.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="skip") as caught:
        played(open_recording(folder))
    assert f"frame {broken}: " in str(caught.value)
    recording = open_recording(folder, skip=True)
    with pytest.warns(UserWarning, match="left out"):
        x = played(recording)
    assert x.isnan().flatten(1).all(1).nonzero().tolist() == [[broken]]
    assert len(x) == 12
    assert f"frame{broken}.png" in recording.remarks[0]


def write(content):
    return lambda path: path.write_bytes(content)


def save(array):
    return lambda path: np.save(path, array)


@pytest.mark.parametrize(
    ("name", "make", "word"),
    [
        ("empty", lambda path: path.mkdir(), "no pictures"),
        ("nested", lambda path: (path / "day1").mkdir(parents=True), "day1"),
        ("list.txt", write(b"\n\n"), "lists no frames"),
        ("list.csv", write(b"file\nnowhere.png\n"), "nowhere.png"),
        ("list.txt", write(b"\xff\xfe"), "UTF-8"),
        ("one.png", write(b""), "one picture"),
        ("cut.npy", write(b"\x93NUMPY\x01"), "cannot be read"),
        ("flat.npy", save(np.zeros((4, 5))), "shape"),
        ("words.npy", save(np.full((4, 5, 5), 1)), "int64"),
        ("bytes.npy", save(np.full((4, 5, 5), 200.0)), "255"),
        ("none", lambda path: None, "no recording"),
    ],
)
def test_what_is_no_recording_is_said_in_words(tmp_path, name, make, word):
    make(tmp_path / name)
    with pytest.raises((ValueError, OSError), match=word):
        played(open_recording(tmp_path / name))


def test_two_arrays_in_a_file_are_not_guessed_between(tmp_path):
    np.savez(tmp_path / "two.npz", day=PIXELS, night=PIXELS)
    with pytest.raises(ValueError, match="day, night"):
        open_recording(tmp_path / "two.npz")


@pytest.mark.parametrize("given", [{"every": 0}, {"size": (0, 4)}, {"size": (4,)}])
def test_impossible_settings_are_refused(tmp_path, given):
    np.save(tmp_path / "frames.npy", PIXELS)
    with pytest.raises(ValueError, match=next(iter(given))):
        open_recording(tmp_path / "frames.npy", **given)
