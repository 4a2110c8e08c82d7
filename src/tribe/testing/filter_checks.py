"""The contract of time filters. A check is named for the property it asserts; its docstring names the bug it catches.

The checks play predictions of a network that does not exist: see `predictions`. A filter has at most 100 images to
find out that there are bursts, or none, and 500 to find out that they have ended.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from tribe.core.state import clone, digest, leaves, stream
from tribe.filters import Filtered, TimeFilter
from tribe.testing import shared
from tribe.testing.shared import labels_in_bursts, predictions

CLASSES = 10
STAY = 0.95  # probability that the next image has the same class: bursts of about 20 images
FIRST = 100  # images after which a filter knows whether there are bursts
END = 500  # images after which a filter knows that bursts have ended
MARGINS = {CLASSES: 2.0, 100: 3.0, 1000: 3.5}  # for K classes: 30 to 42 % of the predictions are wrong
TOO_SURE, CALIBRATED, CAUTIOUS = 2.0, 1.0, 0.4  # how many times too large the logits are


def _play(
    filter: TimeFilter, logits: Tensor, valid: Tensor | None = None, batch: int = 50, state: Any = None
) -> Filtered:
    """Filter a stream of predictions (S, N, K) in batches."""
    streams, _, classes = logits.shape
    valid = torch.ones(logits.shape[:2], dtype=torch.bool) if valid is None else valid
    state = filter.init(streams, classes, logits.new_empty(0)) if state is None else state
    answers, used = [], []
    for z, real in zip(logits.split(batch, 1), valid.split(batch, 1), strict=True):
        filtered = filter.step(state, z, real)
        assert filtered.logits.shape == z.shape, f"logits {tuple(z.shape)} became {tuple(filtered.logits.shape)}"
        assert filtered.used.shape == z.shape[:2], f"used is {tuple(filtered.used.shape)}; expected a value an image"
        assert filtered.used.dtype == torch.bool, f"used is {filtered.used.dtype}; expected booleans"
        answers.append(filtered.logits)
        used.append(filtered.used)
        state = filtered.state
    return Filtered(torch.cat(answers, 1), torch.cat(used, 1), state)


def _bursts(streams: int, images: int, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Return labels (S, N) in bursts, and predictions (S, N, K) of them in float64."""
    labels = labels_in_bursts(streams, images, classes, STAY)
    return labels, predictions(labels, classes)


def _answers(played: Filtered, logits: Tensor) -> Tensor:
    """Return the predictions of a method with the filter: the filter's where it is used, else the method's own."""
    return torch.where(played.used.unsqueeze(-1), played.logits, logits.log_softmax(-1))


def _compared(played: Filtered, logits: Tensor) -> shared.Played:
    """Return all of a run that must be the same in an equal run."""
    return shared.Played([_answers(played, logits), played.used], played.state)


def _errors(answers: Tensor, labels: Tensor) -> int:
    return int((answers.argmax(-1) != labels).sum())


def _same(one: Filtered, other: Filtered, logits: Tensor, tolerance: float = 1e-9) -> bool:
    """Return whether two runs give the same answers to the same predictions."""
    gap = (_answers(one, logits) - _answers(other, logits)).abs()
    return torch.equal(one.used, other.used) and bool((gap <= tolerance).all())


def _moved(state: Any, other: Any, tolerance: float = 1e-9) -> list[str]:
    """Return the names of the tensors in which two states differ."""
    before = leaves(other)
    return [n for n, t in leaves(state).items() if not torch.allclose(t.double(), before[n].double(), 0, tolerance)]


def is_deterministic(filter: TimeFilter) -> None:
    """Catches draws from the global random generators, and anything kept outside the state."""
    (_, logits), runs = _bursts(2, 150), []
    for seed in (1, 2):
        shared.seed_generators(seed)
        with shared.generators_stay():
            runs.append(_compared(_play(filter, logits), logits))
    shared.require_same(runs[0], runs[1], "between equal runs")


def mutates_nothing(filter: TimeFilter) -> None:
    """Catches a state that is updated in place, changed predictions, and counters on the object."""
    _, logits = _bursts(2, 160)
    state = _play(filter, logits[:, :150]).state
    z, valid = logits[:, 150:].clone(), torch.ones(2, 10, dtype=torch.bool)
    valid[0, 3] = False
    old, old_z, old_valid, old_filter = clone(state), z.clone(), valid.clone(), copy.deepcopy(vars(filter))
    filter.step(state, z, valid)
    filter.info(state)
    assert digest(state) == digest(old), "the step changed the state it was given"
    assert torch.equal(z, old_z), "the step changed the predictions"
    assert torch.equal(valid, old_valid), "the step changed the mask"
    assert vars(filter) == old_filter, "the step changed the filter"


def streams_are_independent(filter: TimeFilter) -> None:
    """Catches a belief, a rate or a switch that streams share: S together = each alone."""
    _, logits = _bursts(3, 150)
    logits[1] = logits[1, torch.arange(150) * 77 % 150]  # no bursts in this stream
    together = _play(filter, logits)
    for i in range(3):
        alone, row = _play(filter, logits[i : i + 1]), slice(i, i + 1)
        mine = together._replace(logits=together.logits[row], used=together.used[row])
        assert _same(mine, alone, logits[row]), f"the answers for stream {i} differ when it is alone"
        moved = _moved(stream(together.state, i, 3), alone.state)
        assert not moved, f"{', '.join(moved)} of stream {i} differs when it is alone"


def resumes_exactly(filter: TimeFilter) -> None:
    """Catches anything outside the state that a step depends on: the state is saved in mid-stream and loaded."""
    logits = _bursts(2, 200)[1].float()
    start, end = logits.split(100, 1)
    whole, middle = _play(filter, logits), _play(filter, start)
    resumed = shared.saved_and_loaded(middle.state, filter.init(2, CLASSES, logits.new_empty(0)))
    rest = _play(copy.deepcopy(filter), end, state=resumed)
    last = whole._replace(logits=whole.logits[:, 100:], used=whole.used[:, 100:])
    shared.require_same(_compared(last, end), _compared(rest, end), "after resuming")


def batch_size_does_not_matter(filter: TimeFilter) -> None:
    """Catches a filter that starts anew with every batch, or looks at its batch, without `uses_batch`."""
    _, logits = _bursts(2, 160)
    if filter.uses_batch:  # its state uses the past only
        moved = _moved(_play(filter, logits, batch=5).state, _play(filter, logits, batch=160).state)
        assert not moved, f"{', '.join(moved)} of the state depends on the batch size"
        return
    at_once = _play(filter, logits, batch=160)
    for size in (1, 5):
        again = _play(filter, logits, batch=size)
        assert _same(at_once, again, logits), f"answers differ between batches of {size} and one batch"


def is_causal(filter: TimeFilter) -> None:
    """Catches an answer that depends on a later image; with `uses_batch`, on an image of a later batch."""
    _, logits = _bursts(2, 160)
    place, batch = 143, 20
    other = logits.clone()
    other[:, place:] = other[:, place:].flip(-1) * 3
    first = place // batch * batch if filter.uses_batch else place
    runs = (_play(filter, z, batch=batch) for z in (logits, other))
    one, two = (run._replace(logits=run.logits[:, :first], used=run.used[:, :first]) for run in runs)
    assert _same(one, two, logits[:, :first]), "a later image changed an earlier answer"


def padding_changes_nothing(filter: TimeFilter) -> None:
    """Catches images that are not valid and enter a belief, a rate or a count, wherever they are in the batch."""
    certain = torch.zeros(CLASSES, dtype=torch.float64)
    certain[7] = 50
    for extra in (certain, certain * torch.nan, certain.log()):  # an invalid image may hold anything
        _change_nothing(filter, extra, valid=False)


def an_image_that_says_nothing_changes_nothing(filter: TimeFilter) -> None:
    """Catches a bad image that ends a burst or counts as an image: its logits are equal, or not finite."""
    for value in (0.0, 7.25, -3.5, torch.nan, torch.inf):
        _change_nothing(filter, torch.full((CLASSES,), value, dtype=torch.float64), valid=True)


def _change_nothing(filter: TimeFilter, extra: Tensor, valid: bool) -> None:
    """Put images with the logits ``extra`` (K,) into every batch, in varying places; compare with a run without."""
    _, logits = _bursts(2, 150)
    clean, state = _play(filter, logits, batch=10), None
    answers, used = [], []
    for i, z in enumerate(logits.split(10, 1)):
        real = torch.ones(2, 14, dtype=torch.bool)
        for row in range(2):
            real[row, [(k * k + i + row) % 14 for k in (0, 1, 2, 3)]] = False  # four places
        mixed = extra.repeat(2, 14, 1)
        mixed[real] = z.flatten(0, 1)
        run = _play(filter, mixed, real | valid, batch=14, state=state)
        state = run.state
        assert not bool(run.used[~real].any()), "an image that does not count is filtered"
        answers.append(run.logits[real].view_as(z))
        used.append(run.used[real].view(2, 10))
    mixed_in = Filtered(torch.cat(answers, 1), torch.cat(used, 1), state)
    assert _same(clean, mixed_in, logits), "an image that does not count changed an answer"
    moved = _moved(state, clean.state)
    assert not moved, f"images that do not count moved {', '.join(moved)} of the state"


def stays_finite(filter: TimeFilter) -> None:
    """Catches log 0, 0 / 0 and overflow: extreme and equal logits, one image, 2 and 1000 classes, probability 0."""
    for classes in (2, 1000):
        _, normal = _bursts(1, 12, classes)
        z = normal.float()
        certain = torch.nn.functional.one_hot(z.argmax(-1), classes).float()
        cases = {
            "logits of 1e4 and -1e4": torch.where(certain.bool(), 1e4, -1e4),
            "one logit of -1e4": torch.where(certain.bool(), -1e4, z),
            "logits of 2e38 and -2e38": torch.where(certain.bool(), 2e38, -2e38),
            "logits near -2e38": torch.where(certain.bool(), -2e38, -3e38),
            "a logit of minus infinity": torch.where(certain.roll(1, -1).bool(), -torch.inf, z),
            "equal logits": torch.zeros_like(z),
            "one image": z[:, :1],
            "one class only": z[:, :1].expand_as(z) * 20,
            "probabilities of exactly 0": certain.clamp_min(torch.finfo(torch.float32).tiny).log(),
        }
        for case, extreme in cases.items():
            state = None
            for batch in (extreme, z, extreme, extreme.flip(-1)):
                run = _play(filter, batch, state=state)
                state = run.state
                assert bool(run.logits.isfinite().all()), f"{case}, {classes} classes: an answer is not finite"
                assert shared.is_finite(state), f"{case}, {classes} classes: the state is not finite"


def keeps_no_graph(filter: TimeFilter) -> None:
    """Catches an autograd graph that grows with the stream."""
    with torch.enable_grad():
        run = _play(filter, _bursts(1, 60)[1].requires_grad_())
    shared.require_no_graph(run.logits, *leaves(run.state).values())


def answers_are_log_probabilities(filter: TimeFilter) -> None:
    """Catches answers that do not sum to 1: a method that returns probabilities takes their exponential."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        _, logits = _bursts(2, 200)
        run = _play(filter, logits.to(dtype))
        assert bool(run.used.any()), "the filter was used nowhere in bursts of about 20 images"
        total = run.logits[run.used].logsumexp(-1).abs().max().item()
        assert total <= tolerance, f"the log of the sum of the probabilities is up to {total:.2g}; expected 0"


def state_size_is_fixed(filter: TimeFilter) -> None:
    """Catches a state that grows with the stream, or changes its precision."""
    for dtype in (torch.float32, torch.float64):
        logits = _bursts(2, 120)[1].to(dtype)
        start, end = filter.init(2, CLASSES, logits.new_empty(0)), _play(filter, logits, batch=40).state
        shared.require_same_layout(start, end)
        for name, t in leaves(end).items():
            assert len(t) == 2, f"{name} of the state has {len(t)} rows for 2 streams"


def helps_in_bursts(filter: TimeFilter) -> None:
    """Catches a filter that never turns on, or makes noisy predictions of bursts worse."""
    labels, logits = _bursts(4, 400)
    with_it, without = (_errors(z, labels) for z in (_answers(_play(filter, logits), logits), logits))
    assert with_it < without, f"{with_it} errors in {labels.numel()} images with the filter, {without} without"


def does_no_harm_without_bursts(filter: TimeFilter) -> None:
    """Catches a filter that takes frequent classes, or any two images of many classes, for bursts.

    With independent images it must turn itself off. A filter that never does says why in `always_on`.
    """
    cases = [(classes, heat, 1) for classes in (100, 1000) for heat in (TOO_SURE, CALIBRATED, CAUTIOUS)]
    for classes, heat, tail in [(CLASSES, TOO_SURE, 1), (CLASSES, TOO_SURE, 100), *cases]:
        streams, images = (4, 700) if classes == CLASSES else (2, 400)
        labels = labels_in_bursts(streams, images, classes, stay=0, imbalance=tail)
        used = _play(filter, predictions(labels, classes, MARGINS[classes], heat)).used[:, FIRST:]
        share = used.double().mean().item()
        if filter.always_on is None:
            assert not share, (
                f"{share:.0%} of independent images are filtered ({classes} classes, class imbalance {tail}, logits "
                f"{heat:g} times as large as they should be); say in always_on why, if this is meant"
            )
        else:
            assert share, f"always_on is {filter.always_on!r}, but the filter turns itself off"


def does_no_harm_to_a_cautious_network(filter: TimeFilter) -> None:
    """Catches a filter that overrules a network whose logits are 2.5 times too small, where classes hardly stay.

    It has 500 images to learn that.
    """
    if filter.always_on is not None:
        return
    for stay in (0.25, 0.5):
        labels = labels_in_bursts(2, END + 400, 100, stay)
        logits = predictions(labels, 100, MARGINS[100], CAUTIOUS)
        answers = _answers(_play(filter, logits), logits)
        with_it, without = (_errors(z[:, END:], labels[:, END:]) for z in (answers, logits))
        assert with_it <= without, f"{with_it} errors in 800 images with the filter, {without} without (stay {stay:g})"


def turns_off_when_bursts_end(filter: TimeFilter) -> None:
    """Catches a filter that stays on for good once it is on."""
    if filter.always_on is not None:
        return
    labels = torch.cat((labels_in_bursts(3, 300, CLASSES, STAY), labels_in_bursts(3, END + 200, CLASSES, 0)), 1)
    used = _play(filter, predictions(labels, CLASSES)).used
    assert bool(used[:, 200:300].any(1).all()), "the filter is off after 200 images in bursts"
    assert not bool(used[:, 300 + END :].any()), f"the filter is still on {END} images after the last burst"


def is_documented(filter: TimeFilter) -> None:
    """Catches a filter without a docstring, a paper or a name, and an `always_on` that gives no reason."""
    shared.require_documentation(type(filter))
    assert filter.always_on is None or len(filter.always_on.split()) > 4, "always_on gives no reason"


FILTER_CHECKS = shared.checks_of(globals())
