"""The study of the guard: its page is up to date, and its parts play."""

import json

import pytest
import torch
from benchmarks import guard_cost, guard_study
from benchmarks.guard_play import Images, Player, Some, Source

from tribe import datasets
from tribe.testing import ready
from tribe.testing.samples import small_backbone
from watching import pictures


def test_the_page_has_the_tables_of_the_results():
    text = guard_study.PAGE.read_text()
    assert guard_study.rendered(text) == text


def test_streams_are_played_batch_by_batch_and_go_on_from_their_state():
    play = Player(small_backbone(), ready("tribe+guard"))
    images = Images(pictures(2, 24), torch.zeros(2, 24, dtype=torch.int64))
    wrong, end = play(images, batch=8)
    first, state = play(Images(*(t[:, :16] for t in images)), batch=8)
    rest, again = play(Images(*(t[:, 16:] for t in images)), batch=8, state=state)
    assert torch.equal(wrong, torch.cat((first, rest), 1))
    assert torch.equal(end.method.affine.weight, again.method.affine.weight)


def test_clean_streams_are_drawn_from_real_images():
    source = Source("mnist", None, seeds=(1, 2))
    bursts = source.draw(500, bursts=True)
    assert bursts.x.shape == (2, 500, 1, 28, 28)
    assert bool((bursts.y.diff() >= 0).all())
    assert not torch.equal(bursts.y[0], bursts.y[1])
    assert set(source.of_class(3, 20).y.flatten().tolist()) == {3}


def test_some_images_of_every_domain():
    whole = datasets.create("live-mnist-c")
    some = Some(whole, per=5)
    assert [len(some.labels(domain)) for domain in some.domains] == [5] * len(whole.domains)
    index = torch.arange(5)
    assert torch.equal(some.images(some.domains[2], index), whole.images(some.domains[2], some._chosen))


def test_parts_write_their_rows_and_make_tables(tmp_path):
    where = f"--dataset mnist --shifted live-mnist-c --model compact --device cpu --seeds 1 2 --out {tmp_path}"
    what = "--parts recurring,collapse --visit 30 --visits 2 --methods tribe+guard"
    guard_study.main([*where.split(), *what.split(), "--collapsing", "tent"])
    files = {path.name.split("_")[1]: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert files["recurring"]["settings"]["seeds"] == [1, 2]
    assert [len(row["visits"]) for row in files["recurring"]["rows"]] == [2]
    assert [row["method"] for row in files["collapse"]["rows"]] == ["source", "tent", "tent+guard"]
    page = guard_study.tables(tmp_path)
    assert "| tribe+guard | 2 | 30 | " in page
    assert "| tent, 30 images | " in page


@pytest.mark.slow
def test_the_paper_s_streams_are_played(tmp_path):
    where = f"--dataset mnist --shifted live-mnist-c --model compact --device cpu --seeds 1 2 --out {tmp_path}"
    guard_study.main(f"{where} --parts paper --cells F100 --limit 64 --methods tribe+guard".split())
    (path,) = tmp_path.iterdir()
    assert [row["images"] for row in json.loads(path.read_text())["rows"]] == [64]
    assert "| F100 | " in guard_study.tables(tmp_path)


def test_the_cost_of_a_guard_is_measured_beside_the_method_alone(tmp_path):
    guard_cost.main(
        ["--model", "resnet8", "--device", "cpu", "--batches", "4", "--rounds", "2", "--out", str(tmp_path)]
    )
    rows = json.loads((tmp_path / "guard_cost_cpu_resnet8_float32.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["tribe", "tribe+watch", "tribe+guard"]
    assert rows[0]["share"] == 0
    assert all(row["held"] == 0 for row in rows), "the guard learns from the images of the measurement"
