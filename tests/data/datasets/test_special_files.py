"""Links, pipes and devices in the place of data are named or skipped, and no reader waits for them."""

import os
import socket
import sys

import numpy as np
import pytest
import torch

import layouts
from layouts import made, picture
from tribe import datasets, scenarios
from tribe.data.datasets import fingerprint
from tribe.data.datasets.generation import generate
from tribe.data.images import ImageFileError, read_image
from tribe.experiments.stream import Stream
from tribe.io.files import NotRegular, open_regular, read_regular, regular_size

draw = np.random.default_rng(0)
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs links, pipes and devices")


def dangle(path):
    path.symlink_to("nowhere.png")


def loop(path):
    path.symlink_to(path.name)


def zeros(path):
    path.symlink_to("/dev/zero")


def listen(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)
    os.chdir(here)


SPECIAL = {
    "a dangling link": (dangle, "No such file"),
    "a link to itself": (loop, "Too many levels"),
    "a pipe": (os.mkfifo, "it is a pipe, a socket or a device"),
    "a device": (zeros, "it is a pipe, a socket or a device"),
    "a socket": (listen, "it is a pipe, a socket or a device"),
}
pytest_special = pytest.mark.parametrize("case", SPECIAL)


def replace(path, case):
    """Put a special file in the place of a file; return the words about it."""
    path.unlink(missing_ok=True)
    make, words = SPECIAL[case]
    make(path)
    return words


@pytest.fixture
def camera(tmp_path):
    layouts.write_folder(tmp_path / "camera", draw)
    return tmp_path / "camera"


@pytest_special
def test_only_regular_files_are_opened(case, tmp_path):
    words = replace(tmp_path / "a", case)
    for function in (open_regular, regular_size, lambda path: read_regular(path, 10)):
        with pytest.raises(OSError, match=words):
            function(tmp_path / "a")


def test_links_to_files_are_followed_and_sizes_are_bounded(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 3) == b"abc"
    assert regular_size(tmp_path / "link", 3) == 3
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"abc"
    for function in (open_regular, regular_size, read_regular):
        with pytest.raises(NotRegular, match="it has 3 bytes; expected 2 at most"):
            function(tmp_path / "link", 2)
    with pytest.raises(NotRegular, match="it is a folder; expected a regular file"):
        open_regular(tmp_path)


@pytest_special
def test_a_special_file_is_named_or_skipped(case, camera):
    words = replace(camera / "day/dog/1.png", case)
    with pytest.raises(ImageFileError, match=rf"1.png cannot be read as an image: {words}"):
        read_image(camera / "day/dog/1.png")
    strict = datasets.create("folder", root=str(camera))
    for play in (lambda: list(Stream(strict, scenarios.create("replay"), batch=3)), lambda: fingerprint(strict)):
        with pytest.raises(ImageFileError, match=rf"1.png .*{words}.*unreadable='skip'"):
            play()
    data = datasets.create("folder", root=str(camera), unreadable="skip")
    with pytest.warns(UserWarning, match=f"skipped: .*1.png cannot be read as an image: {words}"):
        valid = torch.cat([batch.valid[0] for batch in Stream(data, scenarios.create("replay"), batch=3)])
    assert (~valid).nonzero().flatten().tolist() == [5]
    assert fingerprint(data) == fingerprint(datasets.create("folder", root=str(camera), unreadable="skip"))


def test_the_fingerprint_of_readable_files_is_as_before(camera):
    """Names, sizes and a few bytes: a change here would give results of the same images another id."""
    for path in camera.rglob("*.png"):
        path.write_bytes(path.name.encode())
    digest = datasets.create("folder", root=str(camera)).digest("day")
    assert digest == "639bfc6b29a21ac85307a05bc979ea014a8c05e4a03628e77d020fd95d827e21"


@pytest_special
def test_a_special_entry_without_a_suffix_is_no_folder(case, camera):
    replace(camera / "day/cat/notes", case)
    replace(camera / "more", case)
    with pytest.warns(UserWarning, match="ignored, no image by its name: .*more and 1 more"):
        assert datasets.create("folder", root=str(camera)).domains == ("day", "night")


def test_the_name_of_an_image_need_not_be_utf_8(camera):
    os.rename(camera / "day/cat/0.png", os.fsencode(camera) + b"/day/cat/\xff.png")
    assert len(datasets.create("folder", root=str(camera)).digest("day")) == 64


def test_imagenet_c_skips_what_it_cannot_read(tmp_path):
    layouts.write_imagenet_c(tmp_path / "ImageNet-C", draw)
    fog = tmp_path / "ImageNet-C/fog/5"
    loop(fog / "loop")
    os.mkfifo(fog / layouts.WNIDS[0] / "a.JPEG")
    data = made("imagenet-c", tmp_path, corruptions=("fog",), unreadable="skip")
    with pytest.warns(UserWarning, match="a.JPEG cannot be read as an image: it is a pipe"):
        assert data.images("fog@5", torch.arange(10)).isnan().flatten(1).any(1).tolist().index(True) == 3


@pytest.mark.parametrize("special", [os.mkfifo, zeros], ids=["a pipe", "a device"])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10-c", "CIFAR-10-C/fog.npy"),
        ("cifar10-c", "CIFAR-10-C/labels.npy"),
        ("cifar10-c", "CIFAR-10-C/made.json"),
        ("mnist-c", "mnist_c/fog/test_images.npy"),
        ("mnist-c", "mnist_c/fog/test_labels.npy"),
        ("cifar10", "cifar-10-batches-bin/test_batch.bin"),
        ("mnist", "mnist/t10k-images-idx3-ubyte"),
        ("mnist", "mnist/t10k-labels-idx1-ubyte.gz"),
        ("imagenet-c", "ImageNet-C/made.json"),
    ],
)
def test_no_data_set_waits_for_a_pipe_or_reads_a_device(name, file, special, tmp_path):
    layouts.write(tmp_path)
    path = tmp_path / file
    path.unlink(missing_ok=True)
    path.with_suffix("").unlink(missing_ok=True) if path.suffix == ".gz" else None
    special(path)
    data = made(name, tmp_path)
    with pytest.raises((ValueError, OSError), match=path.name):
        data.images(data.domains[0], torch.arange(1))


def test_tribe_corrupt_refuses_a_pipe(tmp_path):
    (tmp_path / "val/n01440764").mkdir(parents=True)
    picture(draw, 300, 300).save(tmp_path / "val/n01440764/a.JPEG")
    os.mkfifo(tmp_path / "val/n01440764/b.JPEG")
    with pytest.raises(NotRegular, match=r"it is a pipe, .*b.JPEG"):
        generate("imagenet", data=str(tmp_path / "val"), out=str(tmp_path / "out"), corruptions=["contrast"])
    assert not list((tmp_path / "out").rglob("*.JPEG"))
