"""The study of estimates runs, and the tables of docs/health.md are made from its results."""

import json

import pytest
import torch
from benchmarks import health_pages, health_play, health_study

from places import ROOT


def test_the_page_shows_the_results():
    page = (ROOT / "docs/health.md").read_text()
    assert health_pages.rendered(page) == page, "run: python -m benchmarks.health_study --render"


def test_a_study_plays_and_its_results_become_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(health_study, "HELD_OUT", 200)
    where = ["--dataset", "live-mnist-c", "--model", "compact", "--device", "cpu", "--out", str(tmp_path)]
    what = ["--methods", "source", "--streams", "iid", "--seeds", "1", "--per", "35", "--records", str(tmp_path / "r")]
    health_study.main([*where, *what])
    (row,) = json.loads((tmp_path / "health_live-mnist-c_compact.json").read_text())["rows"]
    assert (row["method"], row["stream"], row["images"], len(row["true"])) == ("source", "iid", 525, 1)
    assert set(row["estimates"]) == {
        "ours",
        "confidence",
        "temperature",
        "atc",
        "doc",
        "aetta",
    }  # GDE needs two networks
    kept = health_play.load(health_play.path_of(tmp_path / "r", "source", "iid", 1))
    right = (kept.signals.logits.argmax(-1) == kept.label).double()[:500].mean()
    assert row["true"] == [pytest.approx(100 * float(right), abs=0.01)]
    assert row["estimates"]["confidence"] == [
        pytest.approx(100 * float(kept.signals.logits.softmax(-1).amax(-1)[:500].mean()), abs=0.01)
    ]
    text = health_pages.errors(tmp_path)
    assert "| iid | source |" in text
    assert "live-mnist-c" in health_pages.bias(tmp_path)
    assert "source, iid: ours" in capsys.readouterr().out


def test_streams_play_no_image_that_calibrates():
    class Numbers:
        classes, domains = ("0", "1"), ("clean",)

        def labels(self, domain):
            return torch.arange(3000) % 2

        def images(self, domain, index):
            return index

    part = health_play.Part(Numbers(), per=100)
    shown = part.images("clean", torch.arange(100))
    assert int(shown.min()) >= health_play.HELD_OUT
    assert len(shown.unique()) == 100
    assert torch.equal(part.labels("clean"), shown % 2)


def test_errors_and_coverage_by_hand():
    row = {"true": [80.0, 60.0], "low": [70.0, 61.0], "high": [85.0, 70.0]}
    row["estimates"] = {"ours": [75.0, 65.0], "atc": [90.0, 61.0]}
    assert health_pages.mean_errors([row]) == {"ours": 5.0, "atc": 5.5}
    assert health_pages.covered([row]) == 50
    assert health_pages.differences([row], "atc") == [10.0, 1.0]
