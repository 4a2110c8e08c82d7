"""Images as people have them: bytes, arrays, pictures, lists, one image, channels last; each gives the same bits."""

import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import tribe
from networks import learner, refused, started
from places import ROOT
from tribe.testing import CLASSES, small_network

Image = pytest.importorskip("PIL.Image", reason="needs the extra images")
BYTES = torch.randint(256, (6, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
FLOATS = BYTES.float() / 255
ARRAY = BYTES.numpy()
LAST = np.ascontiguousarray(np.moveaxis(ARRAY, 1, -1))  # (6, 8, 8, 3), as cameras and files give it
PICTURES = [Image.fromarray(pixels) for pixels in LAST]
READ_ONLY = ARRAY.copy()
READ_ONLY.flags.writeable = False
SAME = {
    "bytes": BYTES,
    "an array": FLOATS.numpy(),
    "an array of doubles": FLOATS.double().numpy(),
    "an array of bytes": ARRAY,
    "an array that cannot be written": READ_ONLY,
    "an array that runs backwards": ARRAY[::-1].copy()[::-1],
    "an array of another machine": FLOATS.numpy().astype(">f4"),
    "a list of tensors": list(FLOATS),
    "a list of arrays": list(ARRAY),
    "a tuple of pictures": tuple(PICTURES),
    "a list of pictures": PICTURES,
    "pictures with transparency": [picture.convert("RGBA") for picture in PICTURES],
}


@pytest.mark.parametrize("case", SAME)
def test_every_kind_of_images_teaches_the_same(case):
    plain, other = learner(small_network()), learner(small_network())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(other(SAME[case]), plain(FLOATS))
        other.learn(SAME[case])
        plain.learn(FLOATS)
        assert torch.equal(other.predict(SAME[case]), plain.predict(FLOATS))
    assert other.digest() == plain.digest()


@pytest.mark.parametrize("images", [LAST, FLOATS.movedim(1, -1), list(LAST)], ids=["array", "tensor", "list"])
def test_channels_last_is_recognised_and_told_once(images):
    plain, other = learner(small_network()), learner(small_network())
    with pytest.warns(UserWarning, match="movedim") as caught:
        assert torch.equal(other(images), plain(FLOATS))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(images)
    plain(FLOATS)
    assert other.digest() == plain.digest()


def test_images_that_a_network_takes_as_they_are_stay_as_they_are():
    """The first convolution of this network has 3 channels, and the network wants them last."""

    class ChannelsLast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_network()

        def forward(self, x):
            assert x.shape[-1] == 3, "channels last"
            return self.inner(x.movedim(-1, 1))

    model = tribe.adapt(ChannelsLast())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = model.predict(FLOATS.movedim(1, -1))
    assert torch.equal(logits, tribe.adapt(small_network()).predict(FLOATS))


@pytest.mark.parametrize(
    "one", [FLOATS[2], BYTES[2], ARRAY[2], PICTURES[2]], ids=["floats", "bytes", "array", "picture"]
)
def test_one_image_gives_one_row(one):
    plain, other = learner(small_network()), learner(small_network())
    assert torch.equal(other(one), plain(FLOATS[2:3])[0])
    assert other.predict(one).shape == (CLASSES,)
    assert other.digest() == plain.digest()


def test_one_image_of_each_stream_gives_a_row_of_each():
    plain, other = learner(small_network(), streams=2), learner(small_network(), streams=2)
    valid = torch.tensor([True, False])
    assert torch.equal(other(FLOATS[:2], valid=valid), plain(FLOATS[:2, None], valid=valid[:, None])[:, 0])
    assert other([PICTURES[0], PICTURES[1]]).shape == (2, CLASSES)
    assert other([PICTURES[:3], PICTURES[3:]]).shape == (2, 3, CLASSES)
    assert [info.images for info in other.info] == [5, 4]
    with pytest.warns(UserWarning, match="movedim"):
        assert other(np.stack((LAST[:3], LAST[3:]))).shape == (2, 3, CLASSES)


def test_grey_images_need_no_axis_of_channels():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)
    )
    model = tribe.adapt(net)
    grey = PICTURES[0].convert("L")
    expected = model.predict(torch.from_numpy(np.asarray(grey).copy())[None, None] / 255)[0]
    for one in (grey, np.asarray(grey), np.asarray(grey)[None]):
        assert torch.equal(model.predict(one), expected)
    with refused(model, ValueError, "unsqueeze"):
        model(np.stack([np.asarray(grey)] * 4))


def test_a_fleet_and_the_source_take_them_too():
    cameras = tribe.fleet(small_network())
    logits = cameras({"door": PICTURES[0], "gate": ARRAY[:3]})
    assert {name: tuple(own.shape) for name, own in logits.items()} == {"door": (CLASSES,), "gate": (3, CLASSES)}
    assert cameras.predict_source(BYTES[0]).shape == (CLASSES,)
    assert torch.equal(cameras.predict({"gate": BYTES})["gate"], cameras.predict({"gate": FLOATS})["gate"])


REFUSED = {
    "a list of other sizes": ([FLOATS[0], FLOATS[0, :, 1:]], ValueError, "differ"),
    "a list of other types": ([FLOATS[0], BYTES[0]], ValueError, "differ"),
    "an empty list": ([], TypeError, "empty"),
    "text": ("camera.png", TypeError, "Pillow"),
    "an array of text": (np.array(["a"]), TypeError, "array"),
    "a picture with 16 bits": (Image.new("I;16", (8, 8)), TypeError, "eight bits"),
    "16 bits": (np.zeros((2, 3, 8, 8), np.uint16), TypeError, "65535"),
    "0 to 255": (FLOATS * 255, ValueError, "divide by 255"),
    "0 to 255 in one image": (FLOATS[0] * 255, ValueError, "uint8"),
    "0 to 65,535": (FLOATS * 65535, ValueError, "divide by 255"),
    "most are 0 to 255": (torch.cat((FLOATS[:2], FLOATS[2:] * 255)), ValueError, "divide by 255"),
    "grey": (FLOATS[:, :1], ValueError, r"repeat\(1, 3, 1, 1\)"),
    "transparency": (FLOATS[:, [0, 1, 2, 0]], ValueError, r"images\[:, :3\]"),
    "five channels": (FLOATS[:, [0, 1, 2, 0, 1]], ValueError, "takes 3 channels"),
    "a video": (FLOATS.view(2, 3, 3, 8, 8), ValueError, "flatten"),
    "one row": (FLOATS[0, 0], ValueError, "3 axes"),
}


@pytest.mark.parametrize("call", ["__call__", "predict", "learn"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_told_in_words_of_images(case, call):
    images, error, words = REFUSED[case]
    model = tribe.adapt(small_network())
    before = model.digest()
    with pytest.raises(error, match=words) as caught:
        getattr(model, call)(images)
    assert not re.search("layer|weight|groups|kernel", str(caught.value))
    assert model.digest() == before


def head(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(width, CLASSES))


POOL = nn.AdaptiveAvgPool2d(1)
SIZES = {
    "a fixed size": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), head(4 * 30 * 30)),
        28,
        "32 x 32 pixels only",
    ),
    "too small": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(4), nn.Conv2d(4, 4, 3), POOL, head(4)),
        8,
        "from 14 x 14 pixels",
    ),
    "steps of four": (
        nn.Sequential(nn.Conv2d(3, 1, 1), nn.PixelUnshuffle(4), nn.BatchNorm2d(16), POOL, head(16)),
        10,
        "4 x 4, 8 x 8 and more",
    ),
}


@pytest.mark.parametrize("case", SIZES)
def test_another_size_is_told_in_pixels(case):
    net, side, words = SIZES[case]
    with pytest.raises(ValueError, match=words):
        tribe.adapt(net)(torch.rand(2, 3, side, side))


def test_a_fault_that_is_none_of_the_shape_is_told_as_it_is():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_network()

        def forward(self, x):
            if x.device.type != "meta":
                raise RuntimeError("no such table")
            return self.inner(x)

    with pytest.raises(ValueError, match="no such table"):
        tribe.adapt(Broken())(FLOATS)


def test_a_camera_that_fails_is_the_business_of_a_guard():
    """Proper images came before: a guard skips the others, and nothing is raised in a loop that runs."""
    model = tribe.adapt(small_network(), guard=True)
    with refused(model, ValueError, "divide by 255"):
        model(FLOATS * 255)
    model(FLOATS)
    held = model.health[0].held
    with pytest.warns(UserWarning, match="divide by 255"):
        model(FLOATS * 255)
    assert model.health[0].held == held + 6


def test_a_few_wrong_images_are_told_of_and_no_error():
    model = started()
    with pytest.warns(UserWarning, match="divide by 255"):
        model(torch.cat((FLOATS[:1] * 255, FLOATS[1:])))


def test_a_network_that_takes_0_to_255_is_wrapped():
    inner = nn.Sequential(tribe.Normalize([127.5] * 3, [127.5] * 3), small_network())
    model = tribe.adapt(nn.Sequential(tribe.Normalize([0.0] * 3, [1 / 255] * 3), inner))
    assert model(BYTES).isfinite().all()


def test_a_compiled_adapter_answers_the_same_and_is_told_of_once():
    plain, compiled = learner(small_network()), learner(small_network())
    run = torch.compile(compiled, backend="eager")
    with pytest.warns(UserWarning, match="torch.compile") as caught:
        assert torch.equal(run(FLOATS), plain(FLOATS))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(FLOATS)
    plain(FLOATS)
    assert compiled.digest() == plain.digest()


def test_no_library_of_images_is_imported_for_it():
    code = (
        "import sys, torch, tribe; from tribe.testing import small_network; "
        "model = tribe.adapt(small_network()); model(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)); "
        "assert 'torch._dynamo' not in sys.modules; model(torch.rand(3, 8, 8)); assert 'PIL' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
