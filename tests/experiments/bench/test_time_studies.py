"""The studies of the time filter run, and the tables of docs/time.md are made from their results."""

import json

import pytest
import torch
from benchmarks import time_cost, time_learning, time_pages, time_study
from benchmarks.time_play import AlwaysOn, Progress

import tribe
from places import ROOT
from tribe.core.state import leaves
from tribe.experiments.record import Record
from tribe.filters.markov import Markov
from tribe.testing import CLASSES, images, small_network


def test_the_page_shows_the_results():
    page = (ROOT / "docs/time.md").read_text()
    assert time_pages.rendered(page) == page, "run: python -m benchmarks.time_study --render"


def test_a_study_plays_streams_and_its_results_become_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Progress, "EVERY", 0.0)
    where = ["--dataset", "live-mnist-c", "--model", "compact", "--device", "cpu", "--out", str(tmp_path)]
    what = ["--cells", "F100", "--methods", "source", "--seeds", "1", "2", "--limit", "128", "--parts", "a,e,f"]
    time_study.main([*where, *what])
    said = capsys.readouterr().out
    assert "source: 1 of 2 batches, error" in said
    assert "a: source F100, seeds 1 2: none" in said
    (file,) = tmp_path.glob("time_*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {row["part"] for row in rows} == {"a", "e", "f"}
    assert {row["filter"] for row in rows} == {"none", "past", "batch", "cofa"}
    text = time_pages.study(tmp_path)
    assert all(title in text for title in ("The streams of the paper", "Delay after a change", "Rare classes"))


def test_the_cost_is_measured_and_becomes_a_table(tmp_path, capsys):
    options = ["--model", "resnet8", "--classes", "3", "--batch", "2", "--rounds", "2", "--device", "cpu"]
    time_cost.main([*options, "--out", str(tmp_path)])
    assert "of the step" in capsys.readouterr().out
    assert time_pages.cost(tmp_path).count("resnet8, batch 2") == 2


def test_variants_of_learning_are_measured_and_become_a_table(tmp_path):
    where = ["--dataset", "live-mnist-c", "--model", "compact", "--device", "cpu", "--out", str(tmp_path)]
    time_learning.main([*where, "--limit", "64", "--seeds", "1", "--cells", "F100", "--variants", "0", "4"])
    text = time_pages.learning(tmp_path)
    assert "| TRIBE | " in text
    assert "| trust only where both agree | " in text


def test_a_stream_turns_from_bursts_to_iid_and_back():
    labels = [torch.arange(600) % 10] * 2
    schedule = time_study.Turning(("fog@5", "snow@5"), length=300).schedule(labels, seed=1)
    y = labels[0][schedule.index].view(3, 300)
    sticky = (y[:, 1:] == y[:, :-1]).double().mean(1)
    assert sticky[0] > 0.5 < sticky[2]
    assert sticky[1] < 0.2


def played(label, prediction):
    rows = torch.zeros(len(label))
    return Record(rows.long(), torch.tensor(label), torch.tensor(prediction), rows, rows, ("fog",), 10, {})


def test_a_delay_is_counted_from_the_first_image_of_a_burst():
    record = played([0, 0, 1, 1, 1, 2, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0])
    length, delay, sure = time_study.bursts(record, torch.arange(8.0) / 10)
    assert length.tolist() == [3, 1, 2]
    assert delay.tolist() == [1, 1, 0], "a burst that is never followed has a delay of its length"
    assert sure.tolist() == pytest.approx([0.2, 0.5, 0.6])
    rows = {row["length"]: row for row in time_study.delay_rows(length, delay, sure) if "length" in row}
    assert rows[0] == {"length": 0, "bursts": 1, "never": 100.0, "p50": None, "p95": None}
    assert rows[1] == {"length": 1, "bursts": 2, "never": 0.0, "p50": 1, "p95": 1}


def test_rare_classes_are_those_with_few_images():
    rows = time_study.rare_rows([played([0] * 5 + [1], [0] * 4 + [1] + [0])])
    assert rows == [
        {"count": 0, "images": 1, "inst": 100.0},
        {"count": 1, "images": 5, "inst": 20.0},
    ]


def test_a_filter_that_is_always_on_answers_where_it_would_not():
    logits = 4 * torch.nn.functional.one_hot(torch.tensor([[0, 0, 0, 1]]), 3).float()
    valid = torch.tensor([[True, True, True, False]])
    used = [rule.step(rule.init(1, 3, logits), logits, valid).used for rule in (Markov(), AlwaysOn())]
    assert not used[0].any(), "four images are no evidence"
    assert torch.equal(used[1], valid)


class Eager(time_learning.Learning):
    """Learns from a filter that is always on."""

    @property
    def rule(self):
        return AlwaysOn(within=self.within)


def test_learning_from_the_filter_is_tribe_by_default_and_something_else_in_every_variant():
    net, draws = tribe.Backbone(small_network(seed=3)), torch.Generator().manual_seed(0)
    batches = [images(1, 32, seed) * torch.rand(1, 32, 3, 1, 1, generator=draws) for seed in range(3)]  # two classes

    def after(method):
        state = method.init(net)
        for x in batches:
            _, state = method.step(net, state, x)
        return leaves(state)

    alone = after(tribe.methods.create("tribe", classes=CLASSES, h0=0.9))
    same = after(time_learning.Learning(classes=CLASSES, h0=0.9))
    assert all(torch.equal(alone[name], same[name]) for name in alone)
    for name, fields in time_learning.VARIANTS.items():
        if fields:
            other = after(Eager(classes=CLASSES, h0=0.9, **fields))
            assert any(not torch.equal(alone[part], other[part]) for part in alone), name
