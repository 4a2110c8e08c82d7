"""Memories: the slow loops on random streams, each rule case by case, and what a memory promises."""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import reference
from tribe.core import memory, rng
from tribe.core.memory import Reservoir, Timely
from tribe.core.rng import Key

NETWORK: Any = SimpleNamespace(dtype=torch.float64, device=torch.device("cpu"))


class Stream(NamedTuple):
    """Images that show their position: image i of a stream is filled with i."""

    label: Tensor  # (S, T)
    uncertainty: Tensor  # (S, T) float64
    valid: Tensor  # (S, T)

    @property
    def image(self) -> Tensor:
        position = torch.arange(self.label.shape[1], dtype=torch.float64)
        return position[:, None, None].expand(len(self.label), -1, 2, 3)


def draw(
    seed: int, length: int = 150, classes: int = 5, streams: int = 1, invalid: float = 0.1, bursts: bool = True
) -> Stream:
    """Classes in bursts, or even; uncertainties anywhere, some of them equal."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(classes, (streams, length), generator=g)
    if bursts:
        label = label[:, torch.arange(length) // 9 * 9]
        label = torch.where(
            torch.rand(label.shape, generator=g) < 0.2, torch.randint(classes, (1,), generator=g), label
        )
    doubt = torch.rand(streams, length, generator=g, dtype=torch.float64).mul(20).round().div(20) * math.log(classes)
    return Stream(label, doubt, torch.rand(streams, length, generator=g) >= invalid)


def timely(size: int, streams: int = 1) -> Timely:
    return memory.new_timely(NETWORK, streams, size, 6)


def reservoir(size: int, classes: int, streams: int = 1) -> Reservoir:
    return memory.new_reservoir(NETWORK, streams, size, 6, classes)


def arrive(held: Any, played: Stream, classes: int, seeds: Tensor, batch: int) -> Any:
    """Play a stream in batches."""
    held = memory.fit(held, played.image)
    parts = zip(*(t.split(batch, 1) for t in (played.image, *played)), strict=True)
    for image, label, doubt, valid in parts:
        if isinstance(held, Timely):
            held = memory.add_timely(held, image, label, doubt, valid, classes)
        else:
            held = memory.add_reservoir(held, image, label, valid, seeds)
    return held


def play(kind: str, played: Stream, size: int, classes: int, batch: int = 16, seed: int = 0) -> Any:
    streams = len(played.label)
    empty = timely(size, streams) if kind == "timely" else reservoir(size, classes, streams)
    return arrive(empty, played, classes, seed + torch.arange(streams), batch)


def contents(held: Any, row: int = 0) -> list[tuple[int, ...]]:
    """(position, label) of all images held, with the age if the memory has one."""
    columns = [held.image[..., 0].long(), held.label] + ([held.age] if isinstance(held, Timely) else [])
    return [tuple(int(t[row, i]) for t in columns) for i in range(int(held.held[row]))]


def slow(kind: str, played: Stream, size: int, classes: int, seed: int = 0) -> Any:
    """The same by the loops in reference.py, for one stream."""
    model: Any = reference.TimelyMemory(size, classes) if kind == "timely" else reference.ReservoirMemory(size, classes)
    numbers = torch.arange(played.valid.sum())
    draws = iter(rng.uniform(Key(torch.full_like(numbers, seed), numbers), memory.DRAWS, (2,)).tolist())
    for position, (label, doubt, valid) in enumerate(zip(*(t[0].tolist() for t in played), strict=True)):
        if not valid:
            continue
        if kind == "timely":
            model.add(position, label, doubt)
        else:
            model.add(position, label, *next(draws))
    return model


both = pytest.mark.parametrize("kind", ["timely", "reservoir"])


CASES = {  # places, classes, images in a batch
    "usual": (16, 5, 16),
    "odd batches": (16, 5, 7),
    "quota is whole": (12, 4, 64),
    "more classes than places": (9, 30, 16),
    "two classes": (10, 2, 16),
    "one place": (1, 3, 5),
    "never full": (400, 5, 16),
    "many places": (64, 10, 150),
}


@both
@pytest.mark.parametrize("case", CASES)
def test_equals_the_slow_loop(kind: str, case: str) -> None:
    size, classes, batch = CASES[case]
    for seed in range(12):
        played = draw(seed, classes=classes, bursts=seed % 2 == 0)
        held = play(kind, played, size, classes, batch, seed)
        model = slow(kind, played, size, classes, seed)
        assert contents(held) == model.contents()
        assert int(held.arrivals) == int(played.valid.sum())
        if isinstance(held, Reservoir):
            assert held.predicted[0].tolist() == model.predicted


@both
def test_every_moment_within_a_batch_equals_the_slow_loop(kind: str) -> None:
    """Catches a memory that is right at the end of a batch only: RoTTA reads it midway."""
    played = draw(3, length=40)
    start = play(kind, draw(4, length=60), 16, 5)
    for passed in range(41):
        columns = {"image": played.image, "label": played.label}
        if isinstance(start, Timely):
            turnover = memory.admit_timely(start, played.label, played.uncertainty, played.valid, 5)
            columns |= {"arrival": memory.arrival_numbers(start, played.valid), "uncertainty": played.uncertainty}
        else:
            turnover = memory.admit_reservoir(start, played.label, played.valid, torch.tensor([0]))
        midway = memory.hold(start, columns, turnover, played.valid, torch.tensor([passed]))
        cut = Stream(*(t[:, :passed] for t in played))
        whole = arrive(start, cut, 5, torch.tensor([0]), 64) if passed else start
        assert contents(midway) == contents(whole)
        assert int(midway.arrivals) == int(whole.arrivals)


def sequence(*arrivals: tuple[int, float]) -> Stream:
    """(label, uncertainty) of each arrival."""
    label, doubt = zip(*arrivals, strict=True)
    return Stream(torch.tensor([label]), torch.tensor([doubt], dtype=torch.float64), torch.ones(1, len(label)) > 0)


def held_after(size: int, classes: int, *arrivals: tuple[int, float]) -> list[int]:
    return [position for position, *_ in contents(play("timely", sequence(*arrivals), size, classes))]


def test_a_class_accepts_below_its_quota_which_is_a_real_number() -> None:
    """Four places and three classes, quota 4/3: a class takes two places before its images have to leave."""
    assert held_after(4, 3, (0, 0.5), (0, 0.5)) == [0, 1]
    assert held_after(4, 3, (0, 0.5), (0, 0.5), (0, 0.5)) == [1, 2]  # the oldest has the highest score


def test_at_quota_only_images_of_the_same_class_leave() -> None:
    """The uncertain image of the other class stays, although its score is the highest of all."""
    assert held_after(4, 2, (1, 0.69), (0, 0.1), (0, 0.1), (0, 0.1)) == [0, 2, 3]


def test_below_quota_in_a_full_memory_images_of_the_largest_classes_leave() -> None:
    """Five places, three classes, quota 5/3. Classes 0 and 1 hold two: the most uncertain of these leaves."""
    assert held_after(3, 3, (0, 0.1), (1, 0.1), (2, 1.0), (2, 0.1)) == [0, 1, 3]  # at quota 1: its own
    assert held_after(5, 3, (0, 0.1), (0, 0.6), (1, 1.0), (1, 0.5), (2, 1.09), (2, 0.1)) == [0, 1, 3, 4, 5]


def test_an_equal_score_does_not_let_the_newcomer_in() -> None:
    """The score of the held image has to exceed the newcomer's."""
    worth = 1 / (1 + math.exp(-1 / 2)) - 0.5
    doubt = next(d for n in range(-4, 5) if (d := worth * math.log(2) * (1 + n * 2**-52)) / math.log(2) == worth)
    for slack, kept in ((1e-9, [0]), (0.0, [0]), (-1e-9, [1])):
        assert held_after(2, 2, (0, 0.0), (0, doubt + slack)) == kept


def test_on_ties_the_later_leaves() -> None:
    """Very old images have equal scores, to the last digit; of two equal ones the later leaves."""
    first = sequence((0, 0.3), (0, 0.3), (1, 0.1), (1, 0.1))
    held = play("timely", first, 4, 2)
    assert contents(held)[:2] == [(0, 0, 4), (1, 0, 3)]
    old = held._replace(arrivals=held.arrivals + 10_000)
    after = arrive(old, sequence((0, 0.0)), 2, torch.tensor([0]), 1)
    assert [(label, age) for _, label, age in contents(after)] == [(0, 10_005), (1, 10_003), (1, 10_002), (0, 1)]


def test_within_a_class_every_arrival_is_as_likely_to_be_held() -> None:
    """600 streams of one class, 40 arrivals, 8 places: each is held with probability 1/5, whenever it came."""
    streams = 600
    played = Stream(torch.zeros(streams, 40, dtype=torch.int64), torch.zeros(streams, 40).double(), torch.ones(1) > 0)
    played = played._replace(valid=torch.ones(streams, 40, dtype=torch.bool))
    held = play("reservoir", played, 8, 2, batch=40)
    assert torch.equal(held.held, torch.full((streams,), 8))
    share = torch.bincount(held.image[..., 0].long().flatten(), minlength=40) / streams
    error = math.sqrt(0.2 * 0.8 / streams)  # standard error of each share
    assert (share - 0.2).abs().max() < 4 * error
    assert abs(share[:20].mean() - 0.2) < 4 * error / math.sqrt(20)


@pytest.mark.parametrize("size", [8, 15, 16])
def test_balanced_predictions_leave_classes_balanced_within_one(size: int) -> None:
    """In the least even order: first all of one class, then all of the next."""
    label = torch.arange(4).repeat_interleave(25)[None]
    for order in (torch.arange(100), torch.randperm(100, generator=torch.Generator().manual_seed(0))):
        played = Stream(label[:, order], torch.zeros(1, 100).double(), torch.ones(1, 100) > 0)
        held = play("reservoir", played, size, 4)
        counts = torch.bincount(held.label[0, : int(held.held)], minlength=4)
        assert int(counts.max() - counts.min()) <= 1
        assert int(counts.sum()) == size


def test_a_rare_class_always_gets_in() -> None:
    """Its class is not among those that hold the most, so no coin is tossed and none of its images leaves."""
    played = sequence(*[(0, 0.0)] * 50, (1, 0.0), (1, 0.0))
    for seed in range(20):
        assert {(50, 1), (51, 1)} <= set(contents(play("reservoir", played, 8, 3, seed=seed)))


@both
def test_free_places_hold_zeros_and_say_so(kind: str) -> None:
    held = play(kind, draw(8, length=5, invalid=0.0, classes=8), 16, 8)
    taken = int(held.held)
    assert 0 < taken <= 5
    assert memory.filled(held)[0].tolist() == [True] * taken + [False] * (16 - taken)
    assert not held.image[0, taken:].any()
    assert not held.label[0, taken:].any()


@both
def test_images_come_back_in_their_shape_and_precision(kind: str) -> None:
    held = play(kind, draw(9, length=12, invalid=0.0), 16, 5)
    pictures = memory.images(held, (2, 3))
    assert pictures.shape == (1, 16, 2, 3)
    assert torch.equal(pictures[..., 1, 2], held.image[..., 5])


@both
def test_smaller_images_fit_and_another_shape_starts_anew(kind: str) -> None:
    """Catches images of one shape read as another: values of two images would be mixed."""
    held = play(kind, draw(10, streams=2), 16, 5)
    assert int(held.held.min()) > 4
    small = torch.full((2, 1, 3), 7.0).double()
    fitted = memory.fit(held, small)
    assert fitted.held.tolist() == [0, 0]
    assert torch.equal(fitted.arrivals, held.arrivals)  # the stream goes on
    assert memory.fit(held, torch.zeros(2, 1, 3, 2)).held.tolist() == [0, 0]  # as many values in another shape
    assert torch.equal(memory.fit(held, torch.zeros(2, 1, 2, 3)).held, held.held)


def test_images_that_are_too_large_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="values"):
        memory.fit(timely(4), torch.zeros(1, 2, 3, 4))
