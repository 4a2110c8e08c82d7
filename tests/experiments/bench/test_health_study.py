"""The study of estimates runs, and the tables of docs/health.md are made from its results."""

import json

import pytest
import torch
from benchmarks import health_compare, health_pack, health_pages, health_play, health_study

from places import ROOT
from tribe.health import rehearsal


def test_the_page_shows_the_results():
    page = (ROOT / "docs/health.md").read_text()
    assert health_pages.rendered(page) == page, "run: python -m benchmarks.health_study --render"


@pytest.fixture
def small(monkeypatch):
    """Few images calibrate."""
    monkeypatch.setattr(health_pack, "HELD_OUT", 200)
    monkeypatch.setattr(rehearsal, "MIXED", 34)
    monkeypatch.setattr(rehearsal, "STRETCH", 40)


def test_a_study_plays_and_its_results_become_tables(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(health_pack, "LONG_TAIL", 1)
    where = ["--dataset", "live-mnist-c", "--model", "compact", "--device", "cpu", "--out", str(tmp_path)]
    what = ["--methods", "source", "--streams", "iid", "--seeds", "1", "--per", "35", "--records", str(tmp_path / "r")]
    health_study.main([*where, *what])
    (row,) = json.loads((tmp_path / "health_live-mnist-c_compact.json").read_text())["rows"]
    assert (row["method"], row["stream"], row["images"], len(row["true"])) == ("source", "iid", 525, 1)
    names = {"ours", "confidence", "temperature", "atc", "doc", "aetta"}  # GDE needs two networks
    assert set(row["estimates"]) == names
    path = tmp_path / "r" / "records_live-mnist-c_compact.safetensors"
    kept = health_play.load(path).played["source/iid/1"].columns
    right = (kept["prediction"] == kept["label"]).double()[:500].mean()
    assert row["true"] == [pytest.approx(100 * float(right), abs=0.01)]
    confidence = 100 * float(kept["confidence"][:500].mean())
    assert row["estimates"]["confidence"] == [pytest.approx(confidence, abs=0.01)]
    assert torch.equal(kept["prediction"], kept["source_prediction"])
    before = path.read_bytes()
    health_study.main([*where, *what])  # goes on: nothing is left to play
    assert path.read_bytes() == before
    text = health_pages.errors(tmp_path)
    assert "| iid | source |" in text
    assert "live-mnist-c" in health_pages.bias(tmp_path)
    assert "| compact on live-mnist-c | iid |" in health_pages.summary(tmp_path)
    assert "compact" not in health_pages.older(tmp_path)  # results of the linear model do not say what model they had
    assert "source: ours" in capsys.readouterr().out
    health_compare.main([str(path), "--seeds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * len(health_compare.VARIANTS)
    ours = abs(row["estimates"]["ours"][0] - row["true"][0])
    assert lines[1].startswith(f"now                      {ours:.2f} | iid {ours:.2f}")


def test_streams_play_no_image_that_calibrates(small, tmp_path):
    class Numbers:
        classes, domains = ("0", "1"), ("clean",)

        def labels(self, domain):
            return torch.arange(1000) % 2

        def images(self, domain, index):
            x = torch.zeros(len(index), 1, 28, 28)
            x[:, 0, 0, 0], x[:, 0, 0, 1] = index // 256 / 255, index % 256 / 255
            return x

    path = tmp_path / "pack.safetensors"
    health_pack.save(path, health_pack.make(Numbers(), Numbers(), "numbers", "numbers", per=10))
    pack = health_pack.load(path)

    def numbers(x):
        return x[:, 0, 0, 0].int() * 256 + x[:, 0, 0, 1].int()

    clean = numbers(pack.clean[0])
    assert clean.tolist() == list(range(200))
    shown = numbers(pack.shown.images("clean", torch.arange(40)).mul(255).round())
    assert len(shown.unique()) == 40
    assert int(shown.min()) >= 200
    assert torch.equal(pack.shown.labels("clean"), shown % 2)
    for plan, place in zip(pack.plans, pack.places, strict=True):
        plain = plan.condition == 0
        assert torch.equal(numbers(pack.corrupted[place[plain]]), plan.number[plain].int())


def test_a_pack_of_a_published_set_is_made_from_clean_images(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(health_pack, "LONG_TAIL", 1)
    path = tmp_path / "pack.safetensors"
    health_study.main(["--dataset", "mnist-c", "--live", "--pack", str(path), "--pack-only", "--per", "10"])
    pack = health_pack.load(path)
    assert (pack.dataset, pack.trained_on, len(pack.shown.domains)) == ("mnist-c", "mnist", 15)
    assert "15 domains, 3 streams" in capsys.readouterr().out


def test_errors_and_coverage_by_hand():
    row = {"true": [80.0, 60.0], "low": [70.0, 61.0], "high": [85.0, 70.0]}
    row["estimates"] = {"ours": [75.0, 65.0], "atc": [90.0, 61.0]}
    assert health_pages.mean_errors([row]) == {"ours": 5.0, "atc": 5.5}
    assert health_pages.covered([row]) == 50
    assert health_pages.half_width([row]) == 6
    assert health_pages.differences([row], "atc") == [10.0, 1.0]
