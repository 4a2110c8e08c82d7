"""The difference between two results, from records that are written by hand."""

import pytest
import torch

from tribe.experiments.record import Record
from tribe.experiments.result_diff import DifferentData, diff_results, load_side, side_of_records

SPEC = {
    "dataset": {"name": "mnist-c", "fields": {"seed": 0}},
    "images": "5f",
    "scenario": {"name": "gli-f", "fields": {"imbalance": 100.0}},
    "method": {"name": "tribe", "fields": {"lr": 0.001}},
    "batch": 4,
}


def made(prediction, lr=0.001, seed=0, label=(0, 1, 2, 0, 1, 2), confidence=0.5, **spec):
    """A record of six images in two domains."""
    label, prediction = torch.tensor(label), torch.tensor(prediction)
    words = {**SPEC, "method": {"name": "tribe", "fields": {"lr": lr}}, "seed": seed, "experiment": str(lr), **spec}
    share = torch.full((6,), confidence)
    return Record(torch.arange(6) // 3, label, prediction, share, share, ("fog@5", "snow@5"), 3, words)


def diff(a, b):
    return diff_results(side_of_records("A", a), side_of_records("B", b))


def test_the_fields_the_first_image_and_the_gap_of_each_domain():
    found = diff([made((0, 1, 2, 0, 0, 2))], [made((0, 1, 2, 1, 1, 1), lr=0.1, confidence=0.25, note="x")])
    assert found.spec == (("method.fields.lr", 0.001, 0.1), ("note", None, "x"))
    (stream,) = found.streams
    assert (stream.seed, stream.images, stream.different, stream.confidence) == (0, 6, 3, 0.25)
    assert stream.first == (3, "snow@5", 0, (0, 1), (0.5, 0.25))
    fog, snow = found.domains
    assert (fog.domain, fog.errors, fog.gap.mean) == ("fog@5", (0, 0), 0)
    assert (snow.errors, snow.gap.mean) == (pytest.approx((1 / 3, 2 / 3)), pytest.approx(-1 / 3))
    assert found.overall.gap.mean == pytest.approx(-1 / 6)


def test_which_is_better_is_judged_over_seeds_and_else_on_one_stream():
    good, bad = (0, 1, 2, 0, 0, 2), (0, 1, 2, 1, 0, 1)
    one, other = ([made(p, lr, seed) for seed in (0, 1)] for p, lr in ((good, 0.1), (bad, 0.2)))
    assert str(diff(one, other).verdict).startswith("33.33 points better over 2 seeds (")
    assert "points better on this stream" in str(diff(one[:1], other).verdict)


def test_seeds_of_one_stream_are_no_repetition():
    """The scenario replay plays the same images for every seed: three seeds are not surer than one."""
    good, bad = (0, 1, 2, 0, 1, 2), (0, 1, 2, 0, 1, 0)
    replay, drawn = ({"name": "replay", "fields": {"order": order}} for order in ("given", "random"))
    for scenario, words in ((replay, "on this stream, not sure"), (drawn, "over 3 seeds")):
        one, other = ([made(p, seed=s, scenario=scenario) for s in range(3)] for p in (good, bad))
        assert f"16.67 points better {words}" in str(diff(one, other).verdict)
    bare = side_of_records("B", [made(bad, seed=s, scenario=replay) for s in range(3)])._replace(records={})
    one = side_of_records("A", [made(good, seed=s, scenario=replay) for s in range(3)])
    assert diff_results(one, bare).verdict is None, "seeds alone prove nothing here"


def test_source_code_that_was_edited_is_a_difference():
    one, other = (side_of_records(name, [made((0,) * 6)]) for name in "AB")
    one, other = one._replace(code={"method": "12", "model": "7"}), other._replace(code={"method": "34", "model": "7"})
    assert diff_results(one, other).spec == (("code.method", "12", "34"),)


def test_equal_predictions():
    found = diff([made((0, 1, 2, 0, 0, 2))], [made((0, 1, 2, 0, 0, 2))])
    assert found.spec == ()
    assert (found.streams[0].different, found.streams[0].first, found.overall.gap.mean) == (0, None, 0)


def test_only_seeds_that_both_have_are_compared_and_the_gap_has_a_deviation():
    right, wrong = (0, 1, 2, 0, 1, 2), (1, 1, 2, 0, 1, 2)
    found = diff([made(right, seed=seed) for seed in (7, 1, 2)], [made(right, seed=2), made(wrong, seed=1)])
    assert found.seeds == (1, 2)
    assert [stream.different for stream in found.streams] == [1, 0]
    assert found.overall.gap == pytest.approx((-1 / 12, 1 / 6 / 2**0.5, 2))


def test_without_labels_only_predictions_are_compared():
    unknown = (-1,) * 6
    found = diff([made((0,) * 6, label=unknown)], [made((1,) * 6, label=unknown)])
    assert (found.overall, found.domains, found.verdict) == (None, (), None)
    assert found.streams[0].first.label == -1


def test_different_data_are_refused():
    plain = made((0,) * 6)
    for other, words in (
        (made((0,) * 6, images="60"), "images is '5f' and '60'"),
        (made((0,) * 6, scenario={"name": "gli-v", "fields": {}}), "scenario.name is 'gli-f' and 'gli-v'"),
        (made((0,) * 6, seed=3), "share a seed"),
        (made((0,) * 6, label=(1, 1, 1, 0, 0, 0)), "not the same labels and domains"),
        (plain._replace(domains=("fog@5", "frost@5")), "not the same labels and domains"),
    ):
        with pytest.raises(DifferentData, match=words):
            diff([plain], [other])


def test_a_record_that_does_not_say_its_data_is_compared_by_its_labels():
    other = made((0, 0, 2, 0, 0, 2))._replace(spec={"method": {"name": "mine"}, "seed": 0})
    found = diff([made((0, 1, 2, 0, 0, 2))], [other])
    assert found.streams[0].first.image == 1
    assert ("dataset", SPEC["dataset"], None) in found.spec


def test_a_file_of_a_record(tmp_path):
    made((0,) * 6).save(tmp_path / "mine.npz")
    side = load_side(tmp_path / "mine.npz")
    assert side.spec == SPEC
    assert diff_results(side, side_of_records("B", [made((1,) * 6)])).streams[0].different == 6
