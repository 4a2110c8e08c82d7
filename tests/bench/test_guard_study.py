"""The study of the guard: its page is up to date, and its parts play."""

import torch
from benchmarks import guard_study
from benchmarks.guard_study import Images, Source, play, study_clean

from tribe import models
from tribe.engine.backbone import Backbone
from tribe.testing import ready
from tribe.testing.samples import small_backbone
from watching import pictures


def test_the_page_has_the_tables_of_the_results():
    text = guard_study.PAGE.read_text()
    assert guard_study.rendered(text) == text


def test_a_stream_is_played_batch_by_batch_and_goes_on_from_its_state():
    net, method = small_backbone(), ready("tribe+guard")
    images = Images(pictures(1, 24)[0], torch.zeros(24, dtype=torch.int64))
    wrong, end = play(net, method, images, batch=8)
    first, state = play(net, method, Images(*(t[:16] for t in images)), batch=8)
    rest, again = play(net, method, Images(*(t[16:] for t in images)), batch=8, state=state)
    assert torch.equal(wrong, torch.cat((first, rest)))
    assert torch.equal(end.inner.affine.weight, again.inner.affine.weight)


def test_clean_streams_and_faults_are_drawn_from_real_images():
    source = Source("mnist", None)
    rows = list(
        study_clean(Backbone(models.load("compact", models.find("compact", "mnist"))), source, ("source",), 1, 40)
    )
    assert [(row["order"], row["batch"]) for row in rows] == [(o, b) for o in ("random", "bursts") for b in (64, 16, 1)]
    assert all(row["error"] < 10 for row in rows), "the shipped network knows clean digits"
    bursts = source.draw(500, 1, bursts=True)
    assert bool((bursts.y.diff() >= 0).all())
    assert set(source.of_class(3, 20, 1, None).y.tolist()) == {3}
