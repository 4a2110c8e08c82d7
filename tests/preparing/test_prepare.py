"""Preparing the embedded digits: what the file holds, how it is used, stopped work that goes on, and bad input."""

import dataclasses
import json
import warnings

import pytest

import tribe
from commands import succeeded
from commands import tribe_command as command
from tribe.health.playing import Lengths
from tribe.health.prepared import Cost, Prepared, PreparedError
from tribe.io import tensors as tensor_file
from tribe.preparing.preparing import _dear
from tribe.testing import small_network
from watching import SOME, digits

COUNT = 300
LENGTHS = "tribe.preparing.preparing.choose_lengths"


def test_the_card_says_what_to_expect(prepared, net):
    card = prepared.card
    images, labels = digits(0, COUNT)
    right = tribe.adapt(net, "source").predict(images).argmax(-1) == labels
    assert card.source_accuracy == pytest.approx(right.double().mean().item())
    assert [row.corruption for row in card.rows] == ["clean", *SOME["corruptions"]]
    assert card.rows[2].source > 0.5 > card.rows[0].source  # fog
    assert all(cost.adapting > cost.plain > 0 for cost in card.costs)
    assert prepared.method == "bank+guard+time-checked"
    assert (prepared.inputs.shape, prepared.inputs.low, prepared.inputs.high) == ((1, 28, 28), 0.0, 1.0)
    text = str(prepared)
    for word in ("fog", "mean of the corruptions", "plain inference", "MB", "off by about"):
        assert word in text


def test_a_file_holds_all_of_it(prepared, tmp_path):
    path = tmp_path / "net.tribe"
    prepared.save(path)
    again = Prepared.load(path)
    assert again.card == prepared.card
    assert (again.inputs, again.class_names, again.method) == (prepared.inputs, prepared.class_names, prepared.method)
    assert again.calibration == prepared.calibration
    told = again.with_verdict({"words": "adapting helps by 2 to 9 points"})
    told.save(path)
    assert "helps by 2 to 9 points" in str(Prepared.load(path))


def test_one_door(prepared, net, tmp_path):
    """The file alone turns on filter, guard, health and history; a state that is stored goes on with it."""
    path = tmp_path / "net.tribe"
    prepared.save(path)
    images, _ = digits(500, 64)
    for given in (path, str(path), prepared):
        model = tribe.adapt(net, given)
        assert model.method.name == "bank+guard+time-checked"
        model(images)
        health = model.health[0]
        assert health.low <= health.accuracy <= health.high
        assert health.source_low <= health.source_accuracy <= health.source_high
        assert len(model.history) == 1
    model.save(tmp_path / "state.safetensors")
    assert tribe.load(tmp_path / "state.safetensors", net, prepared=path).health == model.health
    fleet = tribe.fleet(net, path)
    fleet({"door": images})
    assert fleet.health("door").accuracy == pytest.approx(health.accuracy, abs=1e-6)


def play(model, images):
    for x in images.split(16):
        model(x)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: (x - 0.13) / 0.31, "deviation"),
        (lambda x: x / 255, "deviation"),
        (lambda x: x[..., 2:-2, 2:-2], "shape"),
    ],
)
def test_images_unlike_those_of_the_preparation_are_told_once(prepared, net, change, words):
    x, _ = digits(300, 80)
    for build in (tribe.adapt, tribe.fleet):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            usual = build(net, prepared)
            usual(x if build is tribe.adapt else {"cam": x})
        model, given = build(net, prepared), change(x)
        with pytest.warns(UserWarning, match="unlike") as told:
            play(model if build is tribe.adapt else lambda x, m=model: m({"cam": x}), given)
        assert [words in str(one.message) for one in told if "unlike" in str(one.message)] == [True]


def test_the_card_names_what_is_lost_and_where_the_budget_does_not_hold(prepared):
    card = prepared.card
    worse = [row._replace(adapting=row.source + 0.02 * (row.corruption == "fog")) for row in card.rows]
    lines = str(dataclasses.replace(card, rows=tuple(worse))).splitlines()
    assert [line.split()[0] for line in lines if "loses 2.0" in line] == ["fog"]
    (note,) = _dear([Cost(64, 1.0, 1.4), Cost(1, 1.0, 3.6)], 1.5)
    assert "3.6 x in batches of 1;" in note
    assert "1.4 x" not in note
    assert _dear([Cost(64, 1.0, 1.4)], 1.5) == _dear([Cost(1, 1.0, 9.0)], None) == []


def test_settings_beside_a_file_are_refused(prepared, net):
    for given in ({"time": "auto"}, {"guard": True}, {"budget": 2.0}, {"observe": 1}):
        with pytest.raises(ValueError, match=rf"leave out {next(iter(given))}="):
            tribe.adapt(net, prepared, **given)


def test_files_that_do_not_fit_are_refused(prepared, tmp_path):
    path = tmp_path / "net.tribe"
    prepared.save(path)
    with pytest.raises(PreparedError, match="another network"):
        tribe.adapt(small_network(), path)
    with pytest.raises(FileNotFoundError, match="prepared file"):
        tribe.adapt(small_network(), tmp_path / "other.tribe")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(PreparedError, match="cut short"):
        Prepared.load(path)
    header = {name: getattr(prepared, name) for name in ("network", "method", "fields", "class_names", "origin")}
    rest = {"inputs": prepared.inputs._asdict(), "verdicts": [], "calibration": None}
    kind = dataclasses.replace(
        tensor_file.Kind("tribe-prepared", 1, dict.fromkeys([*header, *rest, "card"], object), noun="", advice="")
    )
    tensor_file.write(
        path,
        dataclasses.replace(kind, fields={**kind.fields, "network": str, "method": str}),
        {**header, **rest, "card": {"rows": 3}},
        {},
    )
    with pytest.raises(PreparedError, match="its card is damaged"):
        Prepared.load(path)


def test_without_labels_it_compares_with_the_clean_predictions(net):
    images, _ = digits(0, COUNT)
    made = tribe.prepare(net, (255 * images).byte(), method="bank", **SOME)
    assert made.calibration is None
    assert made.card.rows[0].source == 0  # the network agrees with itself
    assert "own predictions" in str(made)
    assert tribe.adapt(net, made).health[0].accuracy is None


class Stopped(Exception):
    pass


def test_what_was_stopped_goes_on_to_the_same_result(net, tmp_path, monkeypatch):
    monkeypatch.setattr("tribe.preparing.preparing.EVERY", 0.0)
    monkeypatch.setattr(LENGTHS, lambda *_: Lengths(125, 32))  # it measures, and the machine may be busy
    images, labels = digits(0, COUNT)
    path, done = tmp_path / "net.tribe", []

    def stop(n, of):
        if n == of - 2:
            raise Stopped

    given = {"path": path, "method": "bank", **SOME}
    with pytest.raises(Stopped):
        tribe.prepare(net, images, labels, progress=stop, **given)
    assert not path.exists()
    part = (tmp_path / "net.tribe.part").read_bytes()
    monkeypatch.setattr(LENGTHS, None)  # the file says it
    again = tribe.prepare(net, images, labels, progress=lambda n, of: done.append(n), **given)
    assert len(done) == 2
    assert path.exists()
    assert not (tmp_path / "net.tribe.part").exists()
    monkeypatch.setattr(LENGTHS, lambda *_: Lengths(125, 32))
    whole = tribe.prepare(net, images, labels, method="bank", **SOME)
    assert again.card.rows == whole.card.rows
    assert again.calibration == whole.calibration
    (tmp_path / "net.tribe.part").write_bytes(part[:1000])
    with pytest.warns(UserWarning, match="begins anew"):
        tribe.prepare(net, images, labels, **given)


def test_doubts_are_said(net):
    images, labels = digits(0, COUNT)
    swapped = labels.clone()
    swapped[labels == 4], swapped[labels == 9] = 9, 4
    made = tribe.prepare(net, images, swapped, method="source", **SOME)
    assert any("class 4" in note and "class 9" in note and "order" in note for note in made.card.notes)
    known = tribe.adapt(net, "source").predict(images).argmax(-1)
    assert any(
        "trained on them" in note for note in tribe.prepare(net, images, known, method="source", **SOME).card.notes
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": slice(0, 50)}, "too few"),
        ({"labels": lambda y: (y + 1) % 10}, "in the network's order"),
        ({"class_names": ("a", "b")}, "10 classes"),
        ({"budget": 0.5}, "at least 1"),
        ({"corruptions": ("fog", "fogg", "spatter")}, "fogg"),
    ],
)
def test_bad_input_is_refused(net, change, words):
    images, labels = digits(0, COUNT)
    part = change.pop("images", slice(None))
    labels = change.pop("labels", lambda y: y)(labels)
    with pytest.raises(ValueError, match=words):
        tribe.prepare(net, images[part], labels[part], **{**SOME, **change})


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = succeeded(
        command("prepare", "--images", 250, "--quick", "--method", "source", "--out", "net.tribe", "--json")
    ).stdout
    report = json.loads(out)
    assert report["method"] == "source+guard+time-checked"
    assert report["card"]["labelled"]
    made = Prepared.load("net.tribe")
    assert made.origin == {"model": "compact", "dataset": "mnist"}
    assert made.class_names == tuple(map(str, range(10)))


def test_the_command_takes_a_folder_of_class_folders(tmp_path, monkeypatch):
    """Class folders were taken for domains without labels."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    images, labels = digits(0, 240)
    for i, (x, y) in enumerate(zip(images, labels.tolist(), strict=True)):
        place = tmp_path / "clean" / str(y)
        place.mkdir(parents=True, exist_ok=True)
        image.fromarray((255 * x[0]).round().byte().numpy()).save(place / f"{i}.png")
    (tmp_path / "my.py").write_text(
        "import torch, tribe\n"
        "class Grey(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = tribe.models.load('compact', tribe.models.find('compact', 'mnist'))\n"
        "    def forward(self, x):\n"
        "        return self.net(x.mean(1, keepdim=True))\n"
    )
    options = ("--model", "my.py:Grey", "--dataset", "folder", "--data", "clean", "--method", "source", "--quick")
    report = json.loads(succeeded(command("prepare", *options, "--json")).stdout)
    assert report["card"]["labelled"]
    assert report["card"]["source_accuracy"] > 0.9
    assert Prepared.load("net.tribe").class_names == tuple(map(str, range(10)))
