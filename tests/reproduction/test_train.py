"""Training learns, is reproducible, resumes, and explains errors; on real digits in MNIST's format."""

import hashlib
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import tribe
from commands import succeeded, tribe_command
from layouts import write_digits
from reproduction.augment import OPERATIONS, AugMix, Views, consistency, crop, draw_views, operate
from reproduction.recipe import PRESETS, Recipe, preset
from reproduction.train import TrainingError, make_optimizer, train
from tribe.data.datasets.files import MissingData

SMALL = Recipe(epochs=3, batch=40, optimizer="adamw", lr=5e-3, weight_decay=1e-2, warmup=0.3, shift=2, border="zero")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"), 1600, 500)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("few"), 200, 60)


class Thin(nn.Module):
    """A network that trains in no time, with dropout: it draws from torch's own generator."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.bn, self.fc = nn.Conv2d(1, 4, 5, 2), nn.BatchNorm2d(4), nn.Linear(4 * 144, 10)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return self.fc(self.dropout(F.relu(self.bn(self.conv(x))).flatten(1)))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- learning ---------------------------------------------------------------------------------------------------------


def test_learns_real_digits_and_leaves_weights_and_a_card(digits, tmp_path):
    out, seen = tmp_path / "compact_mnist.safetensors", []
    trained = train("compact", "mnist", SMALL, data=digits, out=out, device="cpu", on_epoch=seen.append)
    assert trained.accuracy > 0.85  # chance is 0.1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["compact_mnist.json", "compact_mnist.safetensors"]

    net = tribe.models.load("compact", out)  # by name, and what it says is what the card says
    test = tribe.datasets.create("mnist", data=digits)
    with torch.no_grad():
        right = (net(test.images("clean", torch.arange(500))).argmax(1) == test.labels("clean")).float().mean().item()
    card = json.loads((tmp_path / "compact_mnist.json").read_text())
    assert card == trained.card
    assert card["accuracy"] == trained.accuracy == pytest.approx(right, abs=1e-6)
    assert card["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert (card["model"], card["dataset"], card["seed"], card["precision"]) == ("compact", "mnist", 0, "float32")
    assert card["images"] == {"train": 1600, "test": 500}
    assert card["recipe"]["lr"] == SMALL.lr
    assert card["tribe"] == tribe.__version__
    assert card["torch"] == torch.__version__

    history = card["history"]
    assert [entry["epoch"] for entry in history] == [1, 2, 3]
    assert history[-1]["loss"] < history[0]["loss"] / 2
    assert history[-1]["test"] == trained.accuracy
    assert card["seconds"] == pytest.approx(sum(entry["seconds"] for entry in history))
    assert seen == history


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(few):
    other_seeds = itertools.count()

    def weights(seed):
        with torch.random.fork_rng():
            torch.manual_seed(next(other_seeds))  # torch's own generator has no influence
            return train(
                "compact", "mnist", replace(SMALL, epochs=1), data=few, seed=seed, device="cpu"
            ).net.state_dict()

    first = weights(3)
    assert equal(first, weights(3))
    assert not equal(first, weights(4))


def test_leaves_torchs_own_random_numbers_alone(few):
    net = Thin()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(net, "mnist", replace(SMALL, epochs=1), data=few, device="cpu")
    train("compact", "mnist", replace(SMALL, epochs=1), data=few, device="cpu")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd", "lr": 0.05, "weight_decay": 5e-4},
        {"optimizer": "adam", "lr": 3e-3},
        {"schedule": "linear", "smoothing": 0.1, "border": "reflect"},
        {"schedule": "constant", "shift": 0},
        {"augmix": AugMix(weight=2.0)},
    ],
)
def test_every_part_of_a_recipe_learns(few, changes):
    recipe = replace(SMALL, epochs=4, batch=20, **changes)
    history = train(Thin(), "mnist", recipe, data=few, device="cpu").card["history"]
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]


def test_bfloat16_learns_the_same(few):
    recipe = replace(SMALL, epochs=2)
    plain, other = (
        train("compact", "mnist", recipe, data=few, device="cpu", precision=precision).card["history"]
        for precision in ("float32", "bf16")
    )
    assert other[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=0.1)


def test_a_pair_of_data_sets_serves_as_well_as_a_name(few):
    pair = tuple(tribe.datasets.create("mnist", data=few, split=split) for split in ("train", "test"))
    own = train("compact", pair, replace(SMALL, epochs=1), device="cpu")
    named = train("compact", "mnist", replace(SMALL, epochs=1), data=few, device="cpu")
    assert equal(own.net.state_dict(), named.net.state_dict())
    assert own.path is None


def test_weights_of_normalisation_and_biases_do_not_decay():
    decaying, others = make_optimizer(Thin(), SMALL).param_groups
    assert [p.dim() for p in decaying["params"]] == [4, 2]
    assert {p.dim() for p in others["params"]} == {1}
    assert (decaying["weight_decay"], others["weight_decay"]) == (SMALL.weight_decay, 0)


def test_the_rate_falls_as_a_cosine():
    cosine = replace(SMALL, lr=1.0, warmup=0.0, schedule="cosine")
    assert [cosine.rate(step, 4) for step in range(4)] == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    )


# --- views ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("border", ["reflect", "zero"])
def test_a_view_is_a_crop_of_the_padded_image_flipped_or_not(border):
    draw = np.random.default_rng(0)
    images = draw.integers(256, size=(7, 3, 8, 10)).astype(np.uint8)
    part = draw_views(7, 3, True, seed=1, epoch=2, device=CPU)
    got = crop(torch.from_numpy(images), part, border).numpy()
    mode = {"reflect": "reflect", "zero": "constant"}[border]
    for i, (index, dx, dy, flip) in enumerate(zip(*(column.tolist() for column in part[:4]), strict=True)):
        padded = np.pad(images[index], ((0, 0), (3, 3), (3, 3)), mode=mode)
        window = padded[:, 3 + dy : 3 + dy + 8, 3 + dx : 3 + dx + 10]
        assert np.array_equal(got[i], window[:, :, ::-1] if flip else window)
    assert got.dtype == np.uint8


def test_a_hole_is_a_black_square_anywhere_cut_off_at_the_border():
    images = torch.full((500, 1, 8, 10), 9, dtype=torch.uint8)
    part = draw_views(500, 0, False, seed=1, epoch=2, device=CPU)
    got = crop(images, part, "reflect", cutout=4)[:, 0]
    for picture, (y, x) in zip(got.tolist(), part.hole.tolist(), strict=True):
        top, left = int(y * 8) - 2, int(x * 10) - 2
        inside = [[top <= i < top + 4 and left <= j < left + 4 for j in range(10)] for i in range(8)]
        assert picture == [[0 if black else 9 for black in row] for row in inside]
    assert (got == 0).any(0).all(), "every pixel is hidden at some time"
    assert torch.equal(crop(images, part, "reflect"), images)


def test_an_epoch_looks_at_every_image_once_everywhere_and_never_alike():
    first, second = (draw_views(5000, 2, True, seed=0, epoch=epoch, device=CPU) for epoch in (0, 1))
    assert torch.equal(first.order.sort().values, torch.arange(5000))
    assert (first.order == second.order).float().mean() < 0.01
    for moved in (first.dx, first.dy):
        share = torch.bincount(moved + 2, minlength=5) / 5000
        assert share.tolist() == pytest.approx([0.2] * 5, abs=0.03)
    assert first.flip.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert torch.corrcoef(torch.stack((first.dx, first.dy, first.flip)).double())[0, 1:].abs().max() < 0.05
    assert not draw_views(5000, 2, False, seed=0, epoch=0, device=CPU).flip.any()


def test_batches_are_whole_and_the_rest_waits():
    whole = Views(*torch.arange(5 * 11).view(5, 11))
    parts = list(whole.batches(4))
    assert [len(part.order) for part in parts] == [4, 4]
    assert torch.cat([part.dx for part in parts]).tolist() == whole.dx[:8].tolist()


# --- AugMix -----------------------------------------------------------------------------------------------------------


def photographs():
    """Images with all kinds of histograms: smooth, dark, of few values, of one value."""
    draw = np.random.default_rng(0)
    ramp = np.add.outer(np.arange(32) * 3, np.arange(32) * 2)[..., None] + np.array([0, 20, 40])
    noise = draw.integers(256, size=(32, 32, 3))
    dark = draw.integers(30, 90, size=(32, 32, 3))
    flat = np.full((32, 32, 3), 77)
    two = np.where(noise > 128, 200, 10)
    return np.stack([ramp, noise, dark, flat, two]).astype(np.uint8)


def by_pillow(image, name, level, sign):
    """The operation as AugMix's authors define it."""
    pil = pytest.importorskip("PIL.Image")
    ops = pytest.importorskip("PIL.ImageOps")
    image = pil.fromarray(image)
    moved = {
        "shear_x": (1, sign * level * 0.03, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, sign * level * 0.03, 1, 0),
        "translate_x": (1, 0, sign * int(level * 32 / 3 / 10), 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, sign * int(level * 32 / 3 / 10)),
    }
    if name in moved:
        return np.asarray(image.transform((32, 32), pil.Transform.AFFINE, moved[name], pil.Resampling.BILINEAR))
    return np.asarray(
        {
            "autocontrast": lambda: ops.autocontrast(image),
            "equalize": lambda: ops.equalize(image),
            "posterize": lambda: ops.posterize(image, 4 - int(level * 0.4)),
            "solarize": lambda: ops.solarize(image, 256 - int(level * 25.6)),
            "rotate": lambda: image.rotate(sign * int(level * 3), resample=pil.Resampling.BILINEAR),
        }[name]()
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_pillows(name):
    images = photographs()
    for level in (0.1, 1.7, 2.95, 7.3):
        for sign in (-1, 1):
            operation = torch.full((len(images),), OPERATIONS.index(name))
            x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
            got = operate(x, operation, torch.full((len(x),), level), torch.full((len(x),), float(sign)))
            for i, image in enumerate(images):
                wanted = by_pillow(image, name, level, sign).astype(int)
                difference = np.abs(got[i].permute(1, 2, 0).numpy() - wanted)
                # One step of 256 is rounding; a border that rotation cuts a hair's breadth beside is a few pixels.
                assert (difference > 1).mean() < 0.01, (level, sign, i, difference.max())


def test_each_image_gets_its_own_operation():
    x = torch.from_numpy(photographs().transpose(0, 3, 1, 2).copy())[[1]].repeat(len(OPERATIONS), 1, 1, 1)
    index, level, sign = torch.arange(len(x)), torch.full((len(x),), 2.0), torch.ones(len(x))
    together = operate(x, index, level, sign)
    for i in range(len(x)):
        assert torch.equal(together[i], operate(x[i : i + 1], index[i : i + 1], level[i : i + 1], sign[i : i + 1])[0])
    assert len({t.numpy().tobytes() for t in together}) == len(OPERATIONS)


def test_mixtures_stay_near_the_image_and_differ_from_each_other():
    x = torch.from_numpy(photographs().transpose(0, 3, 1, 2).copy())
    key = tribe.core.rng.Key(torch.tensor([0]), torch.tensor([7]))
    mixed = AugMix()(x, key)
    assert mixed.shape == (2, 5, 3, 32, 32)
    assert 0 <= mixed.min() <= mixed.max() <= 1 + 1e-6
    assert torch.equal(mixed, AugMix()(x, key))
    assert not torch.equal(mixed, AugMix()(x, key._replace(clock=key.clock + 1)))
    assert (mixed[0] - mixed[1]).abs().amax((1, 2, 3)).min() > 1e-3
    many = AugMix()(x[2:3].repeat(400, 1, 1, 1), key)
    assert many.mean() == pytest.approx((x[2].float() / 255).mean().item(), abs=0.1)


def test_consistency_is_the_jensen_shannon_divergence():
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    p = logits.double().softmax(-1).numpy()
    mean = p.mean(0)
    wanted = np.mean([(q * np.log(q / mean)).sum(-1).mean() for q in p])
    assert consistency(*logits).item() == pytest.approx(wanted, rel=1e-4)
    assert consistency(logits[0], logits[0], logits[0]).item() == pytest.approx(0, abs=1e-6)


# --- interruption -----------------------------------------------------------------------------------------------------


def stop_after(epochs):
    """Interrupt a training after some epochs, as Ctrl-C would."""

    def stop(entry):
        if entry["epoch"] > epochs:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed_equals_uninterrupted(few, tmp_path, optimizer):
    recipe, out = replace(SMALL, epochs=4, optimizer=optimizer, lr=0.02), tmp_path / "thin.safetensors"
    whole = train(Thin(), "mnist", recipe, data=few, device="cpu")
    options = {"data": few, "device": "cpu", "out": out, "save_every": 0}
    with pytest.raises(KeyboardInterrupt):
        train(Thin(), "mnist", recipe, **options, on_epoch=stop_after(2))
    assert not out.exists()
    trained = train(Thin(seed=9), "mnist", recipe, **options, resume=True)  # weights come from the checkpoint
    assert equal(trained.net.state_dict(), whole.net.state_dict())
    assert equal(load_file(out), whole.net.state_dict())
    without_time = [[{**e, "seconds": 0} for e in t.card["history"]] for t in (trained, whole)]
    assert without_time[0] == without_time[1]
    assert not out.with_suffix(".checkpoint").exists()


@pytest.fixture
def interrupted(few, tmp_path):
    """The options of a training that was interrupted after two epochs of four."""
    options = {"data": few, "device": "cpu", "out": tmp_path / "compact.safetensors", "save_every": 0}
    with pytest.raises(KeyboardInterrupt):
        train("compact", "mnist", replace(SMALL, epochs=4), **options, on_epoch=stop_after(1))
    return options


@pytest.mark.parametrize(
    ("changes", "other", "named"),
    [
        ({"lr": 0.5}, {}, r"recipe\.lr"),
        ({"augmix": AugMix()}, {}, r"recipe\.augmix"),
        ({}, {"seed": 8}, "seed"),
        ({}, {"precision": "bf16"}, "precision"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_by_name(interrupted, changes, other, named):
    with pytest.raises(TrainingError, match=named):
        train("compact", "mnist", replace(SMALL, epochs=4, **changes), **interrupted, **other, resume=True)
    assert interrupted["out"].with_suffix(".checkpoint").exists()


def test_work_is_not_replaced_unasked(interrupted):
    out, recipe = interrupted["out"], replace(SMALL, epochs=1)
    with pytest.raises(TrainingError, match="--resume"):
        train("compact", "mnist", recipe, **interrupted)
    train("compact", "mnist", recipe, **interrupted, force=True)
    finished = out.read_bytes()
    for resume in (False, True):  # nothing to go on from: it is finished
        with pytest.raises(FileExistsError, match="--force"):
            train("compact", "mnist", recipe, **interrupted, resume=resume)
    assert out.read_bytes() == finished
    train("compact", "mnist", recipe, **interrupted, force=True, seed=2)
    assert out.read_bytes() != finished


def test_a_damaged_checkpoint_is_refused(interrupted):
    path = interrupted["out"].with_suffix(".checkpoint")
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"no checkpoint at all"):
        path.write_bytes(damage)
        with pytest.raises(TrainingError, match="damaged"):
            train("compact", "mnist", replace(SMALL, epochs=4), **interrupted, resume=True)


def test_a_failed_write_leaves_the_checkpoint(few, tmp_path):
    out = tmp_path / "compact.safetensors"

    def block(entry):
        if entry["epoch"] == 3:
            out.mkdir()  # in the way of the weights, after the last checkpoint

    options = {"data": few, "device": "cpu", "out": out, "save_every": 0}
    with pytest.raises(OSError, match="compact"):
        train("compact", "mnist", SMALL, **options, on_epoch=block)
    out.rmdir()
    resumed = train("compact", "mnist", SMALL, **options, resume=True)
    assert equal(resumed.net.state_dict(), train("compact", "mnist", SMALL, data=few, device="cpu").net.state_dict())


def test_a_training_that_diverges_stops_and_replaces_nothing(few, tmp_path):
    out = tmp_path / "compact.safetensors"
    out.write_bytes(b"earlier work")
    with pytest.raises(TrainingError, match="diverged"):
        train(Thin(), "mnist", replace(SMALL, optimizer="sgd", lr=1e18), data=few, device="cpu", out=out, force=True)
    assert out.read_bytes() == b"earlier work"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_gpu_learns_and_resumes(digits, tmp_path, precision):
    options = {"data": digits, "device": "cuda", "precision": precision}
    out = {"out": tmp_path / "compact.safetensors", "save_every": 0}
    whole = train("compact", "mnist", SMALL, **options)
    assert whole.accuracy > 0.85
    with pytest.raises(KeyboardInterrupt):
        train("compact", "mnist", SMALL, **options, **out, on_epoch=stop_after(1))
    resumed = train("compact", "mnist", SMALL, **options, **out, resume=True)
    assert resumed.accuracy == pytest.approx(whole.accuracy, abs=0.03)  # its sums come in any order


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epochs", 0), ("epochs", 2.5), ("batch", 0), ("shift", -1), ("cutout", -1), ("lr", 0.0), ("lr", math.nan)),
        *(("weight_decay", -1.0), ("warmup", 1.0), ("optimizer", "lion"), ("schedule", "steps"), ("border", "wrap")),
    ],
)
def test_a_recipe_refuses_nonsense(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        replace(SMALL, **{name: value})


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"model": "wrn16_4"}, ValueError, "channels"),
        ({"model": "compakt"}, ValueError, "compact"),
        ({"model": nn.Linear(3, 10)}, ValueError, "Linear"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(784, 7))}, ValueError, "10 classes"),
        ({"dataset": "mnist-c"}, ValueError, "training"),
        ({"dataset": "cifar10"}, MissingData, "data_batch_1"),
        ({"recipe": "papers"}, ValueError, "paper"),
        ({"recipe": replace(SMALL, batch=500)}, ValueError, "200"),
        ({"device": "tpu9"}, ValueError, "tpu9"),
        ({"precision": "fp8"}, ValueError, "bf16"),
        ({"precision": "tf32"}, ValueError, "CUDA"),
        ({"seed": -1}, ValueError, "seed"),
        ({"out": "nowhere/at/all.safetensors"}, FileNotFoundError, "nowhere"),
        ({"out": "weights.pt"}, ValueError, "safetensors"),
    ],
)
def test_what_cannot_be_trained_is_refused_first(few, options, error, word):
    started = []
    given = {"model": "compact", "dataset": "mnist", "recipe": SMALL, "data": few, "device": "cpu", **options}
    with pytest.raises(error, match=word):
        train(**given, on_epoch=started.append)
    assert started == []


def test_presets_fit_their_networks():
    paper = preset("mnist", "paper")
    assert (paper.model, paper.recipe.epochs, paper.recipe.lr) == ("resnet18_mnist", 100, 1e-3)
    assert preset("cifar100", "augmix").recipe.augmix == AugMix()
    for name, presets in PRESETS.items():
        shape = tribe.datasets.get(name).shape
        assert all(tribe.models.architecture(p.model).channels == shape[0] for p in presets.values())


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_trains_where_the_data_lies(few):
    words = ("train", "mnist", "--data", few, "--set", "epochs=1", "--set", "batch=50")
    result = succeeded(tribe_command(*words, "--json"))
    (path,) = (tribe.data.datasets.files.data_root(few) / "weights").glob("*.safetensors")
    assert path.name == "compact_mnist.safetensors"
    assert json.loads(result.stdout)["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert result.stderr.startswith("epoch 1/1 loss ")
    assert tribe_command(*words).exit_code == 2
    assert "test images correct" in tribe_command(*words, "--force").stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("mnist", "--set", "epochs=0"), "epochs"),
        (("mnist", "--set", "epoch=1"), "epochs"),
        (("mnist", "--set", "epochs"), "FIELD=VALUE"),
        (("mnist", "--preset", "augmix"), "augmix"),
        (("svhn",), "svhn"),
    ],
)
def test_the_command_says_what_is_wrong(few, arguments, word):
    result = tribe_command("train", *arguments, "--data", few)
    assert result.exit_code == 2
    assert word in result.stderr
    assert "Traceback" not in result.stderr
