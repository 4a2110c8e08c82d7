"""The command, from recorded digits to a verdict by labels in a file."""

import csv
import json

import numpy as np
import pytest
import torch

import tribe
from commands import assert_refused, message, succeeded, tribe_command
from trials import digits, digits_network


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("try")
    frames, labels = digits()
    np.save(folder / "day.npy", frames)
    np.save(folder / "night.npy", frames[::-1])
    return folder, labels


@pytest.fixture
def tried(place, tmp_path):
    """Call the command on the day, with one folder for all calls of a test."""
    folder, labels = place

    def call(*options, recording="day.npy", before=None):
        first = () if before is None else (before,)
        return tribe_command("try", *first, folder / recording, "--out", tmp_path / "trial", *options)

    return call, labels, tmp_path / "trial"


def fill_in(path, labels, count):
    """Give the first frames without a label theirs, as a person does in a spreadsheet."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in [row for row in rows if not row["label"]][:count]:
        row["label"] = str(labels[int(row["frame"])])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def test_it_plays_once_and_labels_in_its_file_decide(tried):
    call, labels, folder = tried
    first = succeeded(call())
    assert "will tell" in first.stdout
    assert "they differ on" in first.stdout
    assert "playing" in first.stderr
    fill_in(folder / "labels.csv", labels, 60)
    second = succeeded(call())
    assert "playing" not in second.stderr
    assert "Adapting helps by" in second.stdout
    found = json.loads(succeeded(call("--json")).stdout)
    assert found["verdict"]["labels"] == 60
    assert found["verdict"]["answer"] == "helps"
    again = json.loads(succeeded(call("--json", "--force")).stdout)
    assert again["verdict"] == found["verdict"]


def test_labels_of_another_file_are_added_and_must_agree(tried, tmp_path):
    call, labels, folder = tried
    succeeded(call())
    rows = [line.split(",")[0] for line in (folder / "labels.csv").read_text().splitlines()[1:4]]
    more = tmp_path / "more.csv"
    more.write_text("".join(f"{frame},{labels[int(frame)]}\n" for frame in rows))
    assert json.loads(succeeded(call("--labels", more, "--json")).stdout)["verdict"]["labels"] == 3
    more.write_text(f"{rows[0]},{(labels[int(rows[0])] + 1) % 10}\n")
    assert_refused(call("--labels", more), "contradict", f"frame {rows[0]}")
    more.write_text(f"{rows[0]},eleven\n")
    assert_refused(call("--labels", more), "eleven")


def test_labels_serve_another_method_but_never_other_frames(tried):
    call, labels, folder = tried
    succeeded(call())
    fill_in(folder / "labels.csv", labels, 30)
    kept = (folder / "labels.csv").read_text()
    assert_refused(call(recording="night.npy"), "day.npy", "labels")
    assert (folder / "labels.csv").read_text() == kept
    other = succeeded(call("--method", "bn", "--json"))
    assert "playing" in other.stderr
    assert json.loads(other.stdout)["labels"] == 30
    assert json.loads(other.stdout)["method"].startswith("bn")


def test_names_of_classes_and_settings(tried, tmp_path):
    call, _, folder = tried
    names = tmp_path / "names.txt"
    names.write_text("\n".join(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]))
    options = ("--method", "source", "--classes", names, "--set", "frames.every=9", "--set", "trial.matters=0.05")
    found = json.loads(succeeded(call(*options, "--json")).stdout)
    assert found["frames"] == 100
    assert found["verdict"]["matters"] == 0.05
    assert json.loads((folder / "trial.json").read_text())["classes"][3] == "three"
    names.write_text("one\ntwo\n")
    assert_refused(call(*options), "10 classes")
    names.write_text("one\none\n")
    assert_refused(call(*options), "one twice")


def test_a_prepared_file_is_tried_and_keeps_the_verdict(tried, tmp_path):
    call, labels, folder = tried
    net, x = digits_network(), torch.from_numpy(digits((("", 300),), 1)[0]).unsqueeze(1) / 255
    path = tmp_path / "net.tribe"
    origin = {"model": "compact", "dataset": "mnist"}
    tribe.prepare(net, x, path=path, method="bank", quick=True, origin=origin, corruptions=("stripe", "fog", "shear"))
    assert "will tell" in succeeded(call(before=path)).stdout
    assert tribe.Prepared.load(path).verdicts == ()
    for count in (5, 50):
        fill_in(folder / "labels.csv", labels, count)
        found = json.loads(succeeded(call("--json", before=path)).stdout)
        (kept,) = tribe.Prepared.load(path).verdicts
        assert kept["words"] == f"day.npy: {found['verdict']['words']}"
        assert kept["labels"] == found["verdict"]["labels"]
    assert kept["words"] in str(tribe.Prepared.load(path))
    assert_refused(call("--method", "bn", before=path), "--method")
    assert_refused(call(recording=path), "recorded frames")
    assert_refused(call("--set", "bank.gamma=0.2", before=path), "bank")


def test_every_width_of_a_size(tried):
    call, _, _ = tried
    assert_refused(call("--size", "32"), "28x28")
    succeeded(call("--size", "28x28", "--method", "source", "--set", "frames.every=20"))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--size", "0"), "--size"),
        (("--size", "3x4x5"), "--size"),
        (("--set", "frames.evry=2"), "every"),
        (("--set", "trial.batch=0"), "batch"),
        (("--set", "trial.error=2"), "error"),
        (("--health", "nowhere.safetensors"), "nowhere"),
        (("--labels", "nowhere.csv"), "nowhere"),
        (("--method", "nothing"), "nothing"),
    ],
)
def test_wrong_options_are_words(tried, options, word):
    call, _, _ = tried
    assert word in message(call(*options, "--set", "frames.every=20"))
