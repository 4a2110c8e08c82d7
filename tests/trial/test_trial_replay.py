"""A trial plays what the network and the adapter predict, and its folder holds it."""

import json

import numpy as np
import pytest
import torch

import tribe
from trials import digits, digits_network, recorded, table
from tribe.trial.recordings import open_recording
from tribe.trial.replay import _unknown, play
from tribe.trial.trial import NEITHER, SUMMARY, TABLE, EstimatedAccuracy, EstimatedWindow, Trial
from watching import calibration_of


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    """Digits of a day with blur and noise, their classes, and the trial."""
    folder = tmp_path_factory.mktemp("day")
    frames, labels = digits()
    np.save(folder / "day.npy", frames)
    recording = open_recording(folder / "day.npy", shape=(1, 28, 28))
    return recording, labels, play(recording, tribe.adapt(digits_network(), "bank+time", health=True))


def test_it_plays_what_the_network_and_the_adapter_predict(day):
    recording, _, trial = day
    net, adapter = digits_network().eval(), tribe.adapt(digits_network(), "bank+time", health=True)
    with torch.no_grad():
        plain = torch.cat([net(x).softmax(-1) for x in recording.batches(64)])
    adapted = torch.cat([adapter(x).softmax(-1) for x in recording.batches(64)])
    assert trial.columns.source.tolist() == plain.argmax(-1).tolist()
    assert trial.columns.adapted.tolist() == adapted.argmax(-1).tolist()
    np.testing.assert_allclose(trial.columns.adapted_confidence, adapted.amax(-1).numpy(), atol=1e-5)
    assert trial.ratio > 1


def test_it_helps_under_blur_and_few_labels_say_so(day):
    _, labels, trial = day
    c = trial.columns
    gain = float(np.mean(c.adapted == labels) - np.mean(c.source == labels))
    assert gain > 0.03
    known = trial.labelled({int(frame): int(labels[frame]) for frame in trial.draw[:60]})
    assert known.verdict.answer == "helps"
    assert known.verdict.low <= gain <= known.verdict.high
    whole = trial.labelled({int(frame): int(labels[frame]) for frame in trial.draw})
    assert whole.verdict.estimate == whole.verdict.low == pytest.approx(gain)


def test_candidates_begin_with_both_predictions_and_do_not_say_whose_they_are(day):
    _, _, trial = day
    for row, frame in zip(trial.columns.candidates, trial.differing, strict=True):
        assert row[:2].tolist() == sorted((trial.columns.source[frame], trial.columns.adapted[frame]))
        assert len(set(row.tolist())) == 9


def test_a_source_that_is_tried_never_differs_and_needs_no_label(tmp_path):
    np.save(tmp_path / "day.npy", digits((("fog", 80),))[0])
    trial = play(open_recording(tmp_path / "day.npy", shape=(1, 28, 28)), tribe.adapt(digits_network(), "source"))
    assert len(trial.differing) == 0
    assert trial.verdict.answer == "no difference that matters"


def test_a_folder_holds_all_of_it(day, tmp_path):
    _, labels, trial = day
    known = trial.labelled({int(trial.draw[0]): int(labels[trial.draw[0]])})
    known.save(tmp_path / "trial")
    again = Trial.load(tmp_path / "trial")
    assert again.labels == {}
    assert again.labelled(known.labels).json() == known.json()
    assert json.loads((tmp_path / "trial" / SUMMARY).read_text())["verdict"] == known.verdict.json()
    for name, column in known.columns._asdict().items():
        np.testing.assert_array_equal(getattr(again.columns, name), column)


@pytest.mark.parametrize(
    ("name", "damage", "word"),
    [
        (TABLE, lambda b: b[:-9], "table"),
        (TABLE, lambda b: None, "missing"),
        (SUMMARY, lambda b: b[:90], "JSON"),
        (SUMMARY, lambda b: b.replace(b'"seed": 0', b'"seed": "x"'), "seed"),
        (SUMMARY, lambda b: None, "no trial"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, name, damage, word):
    table([0, 1], [1, 1]).save(tmp_path)
    changed = damage((tmp_path / name).read_bytes())
    (tmp_path / name).unlink()
    if changed is not None:
        (tmp_path / name).write_bytes(changed)
    with pytest.raises((ValueError, OSError), match=word):
        Trial.load(tmp_path)


def test_labels_count_in_the_order_of_the_draw_up_to_the_first_gap():
    trial = table([0] * 30, [1] * 20 + [0] * 10)
    assert sorted(trial.draw.tolist()) == list(range(20))
    first, second, third = trial.draw[:3].tolist()
    assert trial.labelled({first: 1, third: 1}).counted == 1
    verdict = trial.labelled({first: 1, second: NEITHER, third: 0}).verdict
    assert (verdict.labels, verdict.better, verdict.worse) == (3, 1, 1)
    with pytest.raises(ValueError, match="no frame 30"):
        trial.labelled({30: 0})
    with pytest.raises(ValueError, match="no class 4"):
        trial.labelled({0: 4})


def test_the_draw_is_random_fixed_and_shared_by_models():
    """Labels of frames for one model are the first that another asks for."""
    one, other = table([0] * 200, [1] * 200), table([0] * 200, [1, 0] * 100)
    assert one.draw.tolist() == table([0] * 200, [2] * 200).draw.tolist() != list(range(200))
    assert [frame for frame in one.draw.tolist() if frame % 2 == 0] == other.draw.tolist()
    assert table([0] * 200, [1] * 200, seed=1).draw.tolist() != one.draw.tolist()


def test_the_most_telling_frames_are_those_on_which_both_are_confident():
    trial = table([0, 0, 0, 0], [1, 1, 0, 1], ([0.9, 0.6, 1, 0.99], [0.7, 0.65, 1, 0.3]))
    assert trial.telling.tolist() == [0, 1, 3]


def test_windows_whose_accuracy_is_not_known_are_counted_in_a_remark():
    known, unknown = EstimatedAccuracy(0.8, 0.7, 0.9), EstimatedAccuracy(0.8, 0.0, 1.0)
    windows = [EstimatedWindow(500 * i, one, None) for i, one in enumerate((known, unknown, None), 1)]
    assert _unknown(windows[:1]) == []
    assert "1 of 2 windows" in _unknown(windows)[0]


def test_estimates_are_means_over_windows_of_answers_and_source(tmp_path):
    even, odd = EstimatedAccuracy(0.8, 0.7, 0.9), EstimatedAccuracy(0.5, 0.4, 0.6)
    trial = table([0], [0], windows=(EstimatedWindow(500, even, None), EstimatedWindow(750, odd, odd)))
    assert trial.estimate("adapted") == pytest.approx((0.7, 0.6, 0.8))
    assert trial.estimate("source") == odd
    assert table([0], [0]).estimate("adapted") is None
    net = tribe.testing.small_network()
    recording = recorded(tmp_path, 1100, (8, 8))
    played = play(recording, tribe.adapt(net, health=calibration_of(net)), batch=100)
    assert [window.end for window in played.windows] == [500, 1000, 1100]
    for name in ("source", "adapted"):
        low, accuracy, high = (getattr(played.estimate(name), field) for field in ("low", "accuracy", "high"))
        assert 0 <= low <= accuracy <= high <= 1


def test_alarms_and_unreadable_frames_are_in_the_trial(tmp_path):
    net = tribe.testing.small_network()
    frames = np.random.default_rng(0).random((300, 3, 8, 8), np.float32)
    frames[100:] = 0
    frames[7] = np.nan
    np.save(tmp_path / "black.npy", frames)
    trial = play(open_recording(tmp_path / "black.npy"), tribe.adapt(net, "bn", health=True), batch=20)
    assert "black" in {event.kind for event in trial.events}
    assert not trial.columns.readable[7]
    assert trial.columns.readable.sum() == 299
    assert 7 not in trial.differing


def test_wrong_names_and_adapters_are_refused_at_once(tmp_path):
    net, recording = tribe.testing.small_network(), recorded(tmp_path, 20, (8, 8))
    with pytest.raises(ValueError, match="names"):
        play(recording, tribe.adapt(net, "bn"), classes=["cat", "dog"])
    with pytest.raises(ValueError, match="stream"):
        play(recording, tribe.adapt(net, "bn", streams=2))
    with pytest.raises(ValueError, match="batch"):
        play(recording, tribe.adapt(net, "bn"), batch=0)
