"""Bad input gets a clear error, and nothing is lost: what was wrong, what was expected, what to do."""

import dataclasses
import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import tribe
from tribe.engine.screening import sound
from tribe.methods.base import check_classes
from tribe.testing import CLASSES, images, ready, small_network


def batch(seed=0, size=6):
    return images(1, size, seed)[0]


def adapter(streams=1, **fields):
    made = tribe.adapt(small_network(), streams=streams, **fields)
    made(images(streams, 6) if streams > 1 else batch())
    return made


class Uncopyable(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.file = open(__file__)  # noqa: SIM115

    def forward(self, x):
        return self.norm(x)


class Headless(nn.Module):
    """Logits without any layer that tells how many."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(x).mean((2, 3))


class TupleOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small_network()

    def forward(self, x):
        return self.net(x), None


# -- making an adapter: (what is done, exception, message) ----------------------------------------------------------

MAKING = {
    "no norm layers": (lambda: tribe.adapt(nn.Linear(3, 2)), ValueError, "no normalisation layers.*BatchNorm"),
    "not a module": (lambda: tribe.adapt("resnet50"), TypeError, "expected a torch.nn.Module; got str"),
    "a lazy norm layer": (
        lambda: tribe.adapt(nn.Sequential(nn.LazyBatchNorm2d(), nn.Linear(3, 2))),
        ValueError,
        "not known yet: run the model once",
    ),
    "a model that cannot be copied": (lambda: tribe.adapt(Uncopyable()), ValueError, "cannot be copied"),
    "an unknown method": (
        lambda: tribe.adapt(small_network(), "trbe"),
        ValueError,
        "unknown method 'trbe': did you mean 'tribe'",
    ),
    "an unknown field": (
        lambda: tribe.adapt(small_network(), gama=0.1),
        TypeError,
        "method 'tribe' has no field 'gama': did you mean 'gamma'",
    ),
    "a field of another method": (
        lambda: tribe.adapt(small_network(), "tent", h0=0.1),
        TypeError,
        "'tent' has no field 'h0'",
    ),
    "fields beside a built method": (
        lambda: tribe.adapt(small_network(), tribe.methods.create("tent"), lr=1.0),
        TypeError,
        "built already.*lr",
    ),
    "a class count that contradicts the network": (
        lambda: tribe.adapt(small_network(), classes=7),
        ValueError,
        "classes=7, but the network's classifier '8' has 4 outputs",
    ),
    "a method built for other classes": (
        lambda: tribe.adapt(small_network(), tribe.methods.create("tribe", classes=5)),
        ValueError,
        "has 4 outputs",
    ),
    "a network that does not tell its classes": (lambda: tribe.adapt(Headless()), ValueError, "pass classes="),
    "one class": (lambda: tribe.methods.create("tribe", classes=1), ValueError, "at least 2; got 1"),
    "a fraction of a class": (
        lambda: tribe.methods.create("tribe", classes=2.5),
        ValueError,
        "classes of tribe is a whole number; got 2.5",
    ),
    "text for a number": (
        lambda: tribe.adapt(small_network(), lr="x"),
        ValueError,
        "lr of tribe is a finite number; got 'x'",
    ),
    "nothing for a number": (
        lambda: tribe.adapt(small_network(), lr=None),
        ValueError,
        "lr .* is a finite number; got None",
    ),
    "no number at all": (
        lambda: tribe.adapt(small_network(), h0=float("nan")),
        ValueError,
        "h0 .* a finite number; got nan",
    ),
    "infinity for a number": (
        lambda: tribe.adapt(small_network(), lr=float("inf")),
        ValueError,
        "lr of tribe is a finite number; got inf",
    ),
    "a word for a truth": (
        lambda: tribe.adapt(small_network(), "roid", consistency="false"),
        ValueError,
        "consistency of roid is True or False; got 'false'",
    ),
    "a number for a truth that may be open": (
        lambda: tribe.adapt(small_network(), rate_cap=0),
        ValueError,
        "rate_cap of tribe is True or False; got 0",
    ),
    "nothing for a truth": (
        lambda: tribe.adapt(small_network(), "roid", consistency=None),
        ValueError,
        "consistency of roid is True or False; got None",
    ),
    "a truth for a number": (
        lambda: tribe.adapt(small_network(), eta=True),
        ValueError,
        "eta .* a finite number; got True",
    ),
    "a fraction of a neighbour": (
        lambda: tribe.adapt(small_network(), "lame", neighbours=1.5),
        ValueError,
        "neighbours of lame is a whole number; got 1.5",
    ),
    "tribe without classes": (lambda: tribe.methods.create("tribe"), ValueError, "needs their number: classes="),
    "no streams": (lambda: tribe.adapt(small_network(), streams=0), ValueError, "streams.*at least 1; got 0"),
    "a fraction of a stream": (lambda: tribe.adapt(small_network(), streams=1.5), ValueError, "streams.*got 1.5"),
    "a seed that is no int": (lambda: tribe.adapt(small_network(), seed="a"), TypeError, "seed is an int"),
    "eta out of range": (lambda: tribe.adapt(small_network(), eta=0.0), ValueError, r"eta lies in \(0, 1\]"),
    "gamma out of range": (lambda: tribe.adapt(small_network(), gamma=1.5), ValueError, r"gamma lies in \[0, 1\]"),
    "a negative threshold": (lambda: tribe.adapt(small_network(), h0=-0.1), ValueError, "h0 are not negative"),
    "a negative learning rate": (lambda: tribe.adapt(small_network(), lr=-1.0), ValueError, "lr.*not negative"),
    "tent's negative learning rate": (
        lambda: tribe.adapt(small_network(), "tent", lr=-1.0),
        ValueError,
        "lr.*not negative",
    ),
    "an unknown convention": (lambda: tribe.adapt(small_network(), convention="arxiv"), ValueError, "released, paper"),
    "a convention with all that another had settled": (
        lambda: dataclasses.replace(tribe.methods.create("tribe", classes=4), convention="paper"),
        ValueError,
        "convention is 'paper', and anchor_on, .* are all those of another one.*tribe.methods.create",
    ),
    "an unknown anchor": (
        lambda: tribe.adapt(small_network(), anchor_on="labels"),
        ValueError,
        "'logits' or 'posteriors'",
    ),
    "an augmentation that cannot be called": (lambda: tribe.adapt(small_network(), augment=3), TypeError, "callable"),
    "an unknown preset": (
        lambda: tribe.methods.get("tribe").preset("cifar"),
        ValueError,
        "no preset 'cifar': did you mean 'cifar1",
    ),
    "an unknown norm": (lambda: tribe.norms.create("balance"), ValueError, "did you mean 'balanced'"),
    "an unknown classifier layer": (
        lambda: tribe.Backbone(small_network(), classifier="fc"),
        ValueError,
        "no layer 'fc'",
    ),
    "a standard deviation of zero": (lambda: tribe.Normalize([0.5], [0.0]), ValueError, "std above 0"),
}


@pytest.mark.parametrize("case", MAKING)
def test_making(case):
    make, error, message = MAKING[case]
    with pytest.raises(error, match=message):
        make()


def test_the_classes_of_a_method_are_those_of_the_network():
    single = tribe.Backbone(nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(384, 1)))
    for net, classes, words in (
        (tribe.Backbone(small_network()), 7, "classes=7, but the network's classifier '8' has 4 outputs"),
        (single, None, r"classifier '3' has a single output.*2 at least.*\(0, z\)"),
        (single, 1, "single output"),
    ):
        with pytest.raises(ValueError, match=words):
            check_classes(net, classes)
    for net in (tribe.Backbone(small_network()), tribe.Backbone(Headless())):
        check_classes(net, None)
        check_classes(net, CLASSES)


def test_numpys_numbers_are_numbers(tmp_path):
    given = {
        "streams": np.int64(2),
        "seed": np.int32(5),
        "classes": np.int64(CLASSES),
        "lr": np.float32(0.5),
        "rate_cap": np.True_,
    }
    theirs, plain = (
        tribe.adapt(small_network(), **given),
        tribe.adapt(small_network(), streams=2, seed=5, lr=0.5, rate_cap=True),
    )
    assert theirs.digest() == plain.digest()
    assert theirs.method == plain.method
    assert theirs.reset(stream=np.int64(-1)).digest() == plain.digest()
    theirs.save(tmp_path / "a")
    assert tribe.load(tmp_path / "a", small_network()).method == plain.method


# -- images: each is refused and the state is what it was -----------------------------------------------------------

IMAGES = {
    "a numpy array": (np.zeros((2, 3, 8, 8), np.float32), TypeError, "expected a tensor.*ndarray.*from_numpy"),
    "a list": ([1.0], TypeError, "expected a tensor of images; got list"),
    "bytes as pixels": (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), TypeError, r"uint8.*\.float\(\) / 255"),
    "integers": (torch.zeros(2, 3, 8, 8, dtype=torch.int64), TypeError, "int64; expected floating point"),
    "booleans": (torch.zeros(2, 3, 8, 8, dtype=torch.bool), TypeError, "bool; expected floating point"),
    "complex numbers": (torch.zeros(2, 3, 8, 8, dtype=torch.complex64), TypeError, "complex64; expected"),
    "a scalar": (torch.tensor(0.5), ValueError, r"expected images \(B, ...\)"),
    "one axis": (torch.rand(3), ValueError, r"expected images \(B, ...\); got \(3,\)"),
    "grey images for a colour network": (torch.rand(2, 1, 8, 8), ValueError, "first layer takes 3 channels"),
    "channels last": (torch.rand(2, 8, 8, 3), ValueError, "first layer takes 3 channels"),
    "one image without a batch": (torch.rand(3, 8, 8), ValueError, "batches with 4 axes"),
    "video for an image network": (torch.rand(2, 4, 3, 8, 8), ValueError, "batches with 4 axes"),
    "images without pixels": (torch.rand(2, 3, 0, 8), ValueError, r"could not take images of shape \(3, 0, 8\)"),
    "images on another device": (torch.rand(2, 3, 8, 8, device="meta"), ValueError, "on meta, the network on cpu"),
}


@pytest.mark.parametrize("call", ["__call__", "predict", "learn"])
@pytest.mark.parametrize("case", IMAGES)
def test_images(case, call):
    x, error, message = IMAGES[case]
    model = adapter()
    before = model.digest()
    with pytest.raises(error, match=message):
        getattr(model, call)(x)
    assert model.digest() == before
    assert model(batch()).isfinite().all(), "and it goes on"


STREAMS = {
    "a batch for one stream": (torch.rand(6, 3, 8, 8), r"expected images \(2, B, ...\): one row of images a stream"),
    "too many streams": (torch.rand(3, 6, 3, 8, 8), r"got \(3, 6, 3, 8, 8\)"),
}


@pytest.mark.parametrize("case", STREAMS)
def test_images_of_several_streams(case):
    x, message = STREAMS[case]
    model = adapter(streams=2)
    before = model.digest()
    with pytest.raises(ValueError, match=message):
        model(x)
    assert model.digest() == before


def _failing(x):
    raise RuntimeError("no such image")


AUGMENTATIONS = {
    "it changes the shape": (lambda x: x[:, :, ::2], ValueError, r"augment turned images of shape \(6, 3, 8, 8\)"),
    "it fails": (_failing, RuntimeError, "no such image"),
    "it returns no tensor": (lambda x: None, ValueError, r"augment turned .* into NoneType; expected the same"),
}


@pytest.mark.parametrize("case", AUGMENTATIONS)
def test_augmentations(case):
    augment, error, message = AUGMENTATIONS[case]
    model = tribe.adapt(small_network(), augment=augment)
    before = model.digest()
    with pytest.raises(error, match=message):
        model(batch())
    assert model.digest() == before


def test_the_default_augmentation_wants_images():
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = tribe.adapt(net)
    before = model.digest()
    with pytest.raises(ValueError, match="augment="):
        model(torch.rand(4, 5))
    assert model.digest() == before


def test_outputs_that_are_no_logits():
    with pytest.raises(TypeError, match="returned tuple; expected logits"):
        tribe.adapt(TupleOutput())(batch())


# -- what is not an error --------------------------------------------------------------------------------------------


def test_an_empty_batch_returns_empty_logits():
    model, many = adapter(), adapter(streams=2)
    before = model.digest()
    assert model(torch.rand(0, 3, 8, 8)).shape == (0, CLASSES)
    assert model.predict(torch.rand(0, 3, 8, 8)).shape == (0, CLASSES)
    assert many(torch.rand(2, 0, 3, 8, 8)).shape == (2, 0, CLASSES)
    assert model.digest() == before


@pytest.mark.parametrize("method", tribe.methods.names())
def test_a_batch_of_one(method):
    model = tribe.adapt(small_network(), ready(method))
    for seed in range(3):
        assert model(batch(seed, 1)).isfinite().all()


def test_other_floating_precisions_are_converted():
    model, other = adapter(), adapter()
    assert torch.equal(model(batch(1).double()), other(batch(1)))


@pytest.mark.parametrize(
    ("scale", "shift", "cause"),
    [(255, 0, "divide by 255"), (4, -2, "normalised already.*Normalize"), (1.5, 0, "scaled")],
)
def test_values_outside_the_range_are_told_once(scale, shift, cause):
    model = adapter()
    with pytest.warns(UserWarning, match=cause) as caught:
        model(batch() / batch().max() * scale + shift)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch() * scale + shift)


def test_poison_everywhere_touches_nothing():
    model = adapter()
    before = model.snapshot().state
    logits = model(torch.full((4, 3, 8, 8), float("nan")))
    assert (logits == 0).all()
    after = model.state
    assert int(after.info.skipped) == 4
    assert tribe.engine.state.digest(after._replace(info=before.info)) == tribe.engine.state.digest(before)


@pytest.mark.parametrize("value", [float("nan"), 3e19, -2e6])
@pytest.mark.parametrize("method", tribe.methods.names())
def test_one_bad_image_does_not_kill_a_stream(method, value):
    model = tribe.adapt(small_network(), ready(method))
    x = batch()
    x[2] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the others are in range: nothing to say about scaling
        assert model(x).isfinite().all()
    assert (model.info[0].skipped, model.info[0].poisoned) == (1, (2,))
    for seed in range(3):
        assert model(batch(seed)).isfinite().all()
    assert all(t.isfinite().all() for t in tribe.engine.state.leaves(model.state).values())


@pytest.mark.filterwarnings("ignore:images reach")
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e6), (torch.bfloat16, 1e6), (torch.float16, 255.0)])
@pytest.mark.parametrize("method", ["tribe", "selftrain", "note", "tent", "rotta"])
def test_a_large_image_that_counts_leaves_the_state_finite(method, dtype, largest):
    model = tribe.adapt(small_network(dtype=dtype), ready(method))
    x = batch().to(dtype)
    x[0], x[1] = largest, -largest
    x[2] = 1.02 * largest
    for _ in range(3):
        assert model(x).isfinite().all()
    assert model.info[0].poisoned == (2,)
    assert model(batch().to(dtype)).isfinite().all()
    assert all(t.isfinite().all() for t in tribe.engine.state.leaves(model.state).values())


def test_the_limit_follows_the_precision_of_autocast():
    x = torch.full((1, 1, 3, 8, 8), 1000.0)
    assert sound(x).all()
    with torch.autocast("cpu", torch.float16):
        assert not sound(x).any()
    with torch.autocast("cpu", torch.bfloat16):
        assert sound(x).all()


# -- files -----------------------------------------------------------------------------------------------------------


def _rewrite(path, **changes):
    """The same file with another header or other tensors; without a digest, as older versions wrote them."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    metadata.pop("digest")
    tensors.update(changes.pop("tensors", {}))
    for name in changes.pop("without", []):
        del tensors[name]
    save_file(tensors, path, {**metadata, **changes})


FILES = {
    "missing": (lambda p: p.unlink(), FileNotFoundError, "no tribe state file at"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), IsADirectoryError, "is a folder; expected a tribe state file"),
    "with a wrong number": (
        lambda p: _rewrite(p, digest="0", tensors={"affine.bias": torch.zeros(1, 14)}),
        tribe.StateFileError,
        "damaged: it does not hold what was saved",
    ),
    "with numbers that are not finite": (
        lambda p: _rewrite(p, tensors={"affine.bias": torch.full((1, 14), -torch.inf)}),
        tribe.StateFileError,
        r"a state that is not finite \(affine.bias\).*earlier file",
    ),
    "empty": (lambda p: p.write_bytes(b""), tribe.StateFileError, "not a tribe state file, or it was cut short"),
    "text": (lambda p: p.write_text("state\n" * 99), tribe.StateFileError, "not a tribe state file"),
    "a pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), tribe.StateFileError, "not a tribe state file"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-7]), tribe.StateFileError, "cut short"),
    "a truncated header": (lambda p: p.write_bytes(p.read_bytes()[:40]), tribe.StateFileError, "cut short"),
    "weights of some network": (
        lambda p: save_file({"w": torch.ones(2)}, p),
        tribe.StateFileError,
        "not a tribe state",
    ),
    "from a newer version": (
        lambda p: _rewrite(p, schema="2", tribe="9.1"),
        tribe.StateFileError,
        "written by tribe 9.1 with schema 2.*upgrade",
    ),
    "from another model": (lambda p: _rewrite(p, fingerprint="0"), tribe.StateFileError, "saved from another model"),
    "with more streams in its header than in its tensors": (
        lambda p: _rewrite(p, streams="10000000"),
        tribe.StateFileError,
        r"says 10000000 streams, its tensors hold seeds of shape \(1,\)",
    ),
    "of an unknown method": (lambda p: _rewrite(p, method="tribe2"), tribe.StateFileError, "'tribe2', unknown here"),
    "with a broken header": (lambda p: _rewrite(p, fields="{"), tribe.StateFileError, "header"),
    "with a field too many": (
        lambda p: _rewrite(p, fields=json.dumps({"classes": 4, "speed": 3})),
        tribe.StateFileError,
        "speed",
    ),
    "with a tensor missing": (
        lambda p: _rewrite(p, without=["affine.bias"]),
        tribe.StateFileError,
        "affine.bias missing or unexpected",
    ),
    "with a tensor of another shape": (
        lambda p: _rewrite(p, tensors={"affine.bias": torch.zeros(1, 3)}),
        tribe.StateFileError,
        r"affine.bias is \(1, 3\)",
    ),
    "with a tensor of another type": (
        lambda p: _rewrite(p, tensors={"affine.bias": torch.zeros(1, 14, dtype=torch.float16)}),
        tribe.StateFileError,
        "float16; expected",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files(tmp_path, case):
    damage, error, message = FILES[case]
    path = tmp_path / "state.safetensors"
    adapter().save(path)
    damage(path)
    with pytest.raises(error, match=message):
        tribe.load(path, small_network())


def test_a_file_from_another_network(tmp_path):
    adapter().save(tmp_path / "a")
    with pytest.raises(tribe.StateFileError, match="saved from another model"):
        tribe.load(tmp_path / "a", small_network(seed=1))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [({"lr": 0.1}, tribe.StateFileError, "holds lr=0.001 already"), ({"speed": 1}, TypeError, "no field 'speed'")],
)
def test_fields_that_a_file_holds_cannot_be_given(tmp_path, fields, error, message):
    adapter().save(tmp_path / "a")
    with pytest.raises(error, match=message):
        tribe.load(tmp_path / "a", small_network(), **fields)


@pytest.mark.parametrize(
    ("where", "error", "message"), [("gone/a", FileNotFoundError, "no folder"), ("", IsADirectoryError, "is a folder")]
)
def test_saving_where_nothing_can_be_saved(tmp_path, where, error, message):
    with pytest.raises(error, match=message):
        adapter().save(tmp_path / where)


def test_a_state_that_is_not_finite_is_not_saved_over_a_good_one(tmp_path):
    model = tribe.adapt(small_network(), streams=3)
    model(images(3, 6))
    model.save(tmp_path / "a")
    good, snapshot = (tmp_path / "a").read_bytes(), model.snapshot()
    model.state.affine.weight[[0, 2]] = torch.nan
    with pytest.raises(tribe.StateFileError, match=r"of stream 0, 2 is not finite \(.*reset.*restore.*Nothing was"):
        model.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == good
    model.reset(stream=0).reset(stream=2).save(tmp_path / "b")
    model.restore(snapshot).save(tmp_path / "c")
    assert tribe.load(tmp_path / "c", small_network()).digest() == tribe.engine.state.digest(snapshot.state)


# -- life cycle ------------------------------------------------------------------------------------------------------

LIFE = {
    "reset a stream that is not there": (lambda a: a.reset(stream=2), IndexError, "stream 2: .* streams 0 to 1"),
    "reset a fraction of a stream": (lambda a: a.reset(stream=0.5), IndexError, "stream 0.5"),
    "reset a stream below zero": (lambda a: a.reset(stream=-3), IndexError, "stream -3"),
    "export a stream that is not there": (lambda a: a.export(stream=9), IndexError, "stream 9"),
    "export without saying which": (lambda a: a.export(), ValueError, "which of the 2 streams"),
    "restore what is no snapshot": (lambda a: a.restore({}), TypeError, "what snapshot.. gave; got dict"),
    "restore another method's snapshot": (
        lambda a: a.restore(adapter(streams=2, lr=0.5).snapshot()),
        ValueError,
        "the snapshot was taken with",
    ),
    "restore a snapshot of other streams": (
        lambda a: a.restore(adapter(streams=3).snapshot()),
        ValueError,
        "another number of streams",
    ),
    "restore a snapshot of another network": (
        lambda a: a.restore(tribe.adapt(small_network(seed=1), streams=2).snapshot()),
        ValueError,
        "taken on another network",
    ),
    "load the state dict of other streams": (
        lambda a: a.load_state_dict(adapter(streams=3).state_dict()),
        RuntimeError,
        "number of streams.*Nothing was loaded",
    ),
    "load a state dict of lists": (
        lambda a: a.load_state_dict({k: t.tolist() for k, t in a.state_dict().items()}, assign=True),
        RuntimeError,
        "no tensor. Nothing was loaded",
    ),
    "load a state dict that is not finite": (
        lambda a: a.load_state_dict({k: t / 0 if "affine" in k else t for k, t in a.state_dict().items()}),
        RuntimeError,
        r"a state that is not finite \(affine.bias, affine.weight.* Nothing was loaded",
    ),
    "load the state dict of another method": (
        lambda a: a.load_state_dict(tribe.adapt(small_network(), "tent", streams=2).state_dict()),
        RuntimeError,
        "Nothing was loaded",
    ),
}


@pytest.mark.parametrize("case", LIFE)
def test_life_cycle(case):
    act, error, message = LIFE[case]
    model = adapter(streams=2)
    before = model.digest()
    with pytest.raises(error, match=message):
        act(model)
    assert model.digest() == before


def test_a_network_without_affine_parameters_is_refused_by_the_command(tmp_path, monkeypatch):
    from commands import message, tribe_command  # skips without the command's extra

    monkeypatch.chdir(tmp_path)
    norm = "nn.BatchNorm2d(4, affine=False), nn.AdaptiveAvgPool2d(1)"
    code = f"from torch import nn\nnet = nn.Sequential(nn.Conv2d(1, 4, 3), {norm}, nn.Flatten(), nn.Linear(4, 10))\n"
    (tmp_path / "plain.py").write_text(code)
    result = tribe_command("run", "--model", "plain.py:net", "--methods", "tribe")
    assert result.exit_code == 2, result.output
    assert "no normalisation layer of the network has affine parameters to learn" in message(result)


def test_there_are_at_least_forty_cases():
    assert sum(map(len, (MAKING, IMAGES, STREAMS, AUGMENTATIONS, FILES, LIFE))) >= 40
