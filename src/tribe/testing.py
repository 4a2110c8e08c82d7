"""The contract every method, norm rule, scenario and data set is held to; public, for code outside the repository too.

    from tribe.testing import check_method
    check_method(MyMethod(classes=4))       # raises AssertionError naming the property that does not hold

The streams that a method is played are a dozen images long. One that learns only once in so many images, or holds so
many in a memory, says with which fields a few are enough, ``small = {"every": 4, "size": 8}``, and is checked with
those where its own are larger: see `small`. A check of its own, `a_few_images_are_enough`, sees to it.

Each check is named for the property it asserts; its docstring names the bug it catches. The repository runs them over
its registries, and over mutants that each must die of.
"""

import copy
import dataclasses
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tribe import methods
from tribe.datasets import Dataset
from tribe.engine.backbone import Backbone, Output
from tribe.engine.memory import Reservoir, Timely
from tribe.engine.screening import sound
from tribe.engine.slots import SlotHook
from tribe.engine.state import Affine, Stats, clone, digest, leaves, rebuild, stream
from tribe.methods import Method
from tribe.norms import Norm
from tribe.scenarios import LongTail, Natural, Scenario, Schedule, class_counts

CLASSES = 4
SIZE = 8


def small_network(
    classes: int = CLASSES, channels: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A convolutional classifier with BatchNorm, small and not trained, but with statistics as if it were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, classes),
        )
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.weight.uniform_(0.5, 1.5)
                    layer.bias.normal_(0, 0.2)
            cast(nn.Linear, model[-1]).weight.mul_(16)  # sure of itself: some predictions are to be trusted
            model.train()
            for _ in range(20):
                model(torch.rand(32, channels, SIZE, SIZE))
    return model.eval().to(dtype)


def images(streams: int, batch: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """(S, B, 3, 8, 8) images in [0, 1], every stream with a brightness and contrast of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(streams, batch, 3, SIZE, SIZE, generator=generator, dtype=dtype)
    shift = torch.rand(streams, 1, 1, 1, 1, generator=generator, dtype=dtype)
    return (0.3 + 0.7 * x) * (0.4 + 0.6 * shift)


def informed(method: Method, net: Backbone | None = None) -> Method:
    """The method with the source knowledge it needs, if any, of the contract's network (or another) taken here."""
    if method.needs is None:
        return method
    net = net or _network()
    kept = [images(1, 16, seed)[0] for seed in range(100, 106)]
    drawn = [torch.randint(CLASSES, (16,), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    return dataclasses.replace(method, knowledge=method.study(net, zip(kept, drawn, strict=True)))  # type: ignore[call-arg]


def ready(name: str, **fields: Any) -> Method:
    """A registered method for the contract's network, with the source knowledge it needs."""
    return informed(methods.create(name, classes=CLASSES, **fields))


def small(method: Method) -> Method:
    """The method with the fields that its class calls `small`, where its own are larger: for streams of few images."""
    enough: Mapping[str, int] = method.small
    return dataclasses.replace(method, **{field: few for field, few in enough.items() if getattr(method, field) > few})


def _network() -> Backbone:
    return Backbone(small_network())


class _Watchful(Backbone):
    """A network that lets no pass count an image twice, and makes up what it says of images that do not count."""

    def forward(
        self,
        x: Tensor,
        affine: Affine,
        stats: Stats,
        norm: Norm,
        labels: Tensor | None = None,
        valid: Tensor | None = None,
        weights: Mapping[str, Tensor] | None = None,
        spare: Stats | None = None,
        slot_hook: SlotHook | None = None,
    ) -> Output:
        counts = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
        for row, counted in zip(x.detach(), counts, strict=True):
            distinct = row[counted].unique(dim=0)
            assert len(distinct) == int(counted.sum()), (
                "a pass counts an image twice: the stand-in for padding, or for a free place of the memory"
            )
        output = super().forward(x, affine, stats, norm, labels, valid, weights, spare, slot_hook)
        made_up = torch.linspace(-3, 3, output.logits.shape[-1], dtype=output.logits.dtype)
        features = None if output.features is None else output.features.where(counts.unsqueeze(-1), 3.0)
        return output._replace(logits=output.logits.where(counts.unsqueeze(-1), made_up), features=features)


def _play(method: Method, net: Backbone, state: Any, batches: Iterable[Tensor]) -> tuple[list[Tensor], Any]:
    outputs = []
    for x in batches:
        y, state = method.step(net, state, x)
        outputs.append(y)
    return outputs, state


def _stream_of(streams: int, batch: int = 6, steps: int = 4) -> list[Tensor]:
    return [images(streams, batch, seed) for seed in range(steps)]


def _adapted(state: Any) -> dict[str, Tensor]:
    """What of a state can change predictions: all but clocks and reports."""
    return {name: t for name, t in leaves(state).items() if not name.startswith(("key.", "info."))}


@contextmanager
def _generators_stay() -> Iterator[None]:
    """Fail if a generator that the whole program shares is drawn from, or seeded, in between."""
    torch.rand(1)  # each moves on first: seeding one that was just seeded alike would not show
    np.random.random()
    random.random()
    before = _generators()
    yield
    for (whose, was), now in zip(before.items(), _generators().values(), strict=True):
        assert was == now, f"{whose} global generator moved"


def _generators() -> dict[str, Any]:
    """Where the shared generators stand."""
    return {
        "torch's": torch.get_rng_state().tolist(),
        "numpy's": [np.asarray(part).tolist() for part in np.random.get_state()],
        "Python's": random.getstate(),
    }


def _finite(state: Any) -> bool:
    return all(bool(t.isfinite().all()) for t in leaves(state).values())


# -- methods --------------------------------------------------------------------------------------------------------


def never_sees_labels(method: Method) -> None:
    """Catches a method that takes labels or domains, by any name."""
    names = list(inspect.signature(method.step).parameters)
    assert names == ["net", "state", "x", "valid", "donate"], f"step takes {names}"


def is_deterministic(method: Method) -> None:
    """Catches the global random generators, and anything kept outside the state."""
    net, batches = _network(), _stream_of(2)
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        outputs, state = _play(method, net, method.init(net, 2, seed=5), batches)
        runs.append((outputs, digest(state)))
    (first, first_state), (second, second_state) = runs
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "predictions differ between equal runs"
    assert first_state == second_state, "states differ between equal runs"


def leaves_global_random_state_alone(method: Method) -> None:
    """Catches a step that draws from torch's, numpy's or Python's generator, or seeds it: so does its host."""
    net = _network()
    with _generators_stay():
        _, state = _play(method, net, method.init(net), _stream_of(1, steps=2))
        method.predict(net, state, images(1, 6))


def its_clock_ticks(method: Method) -> None:
    """Catches a clock that stands still, with which every step would draw the same numbers, and a seed that changes.

    Asked of methods that draw nothing, too: the clock is also how many batches a stream reports to have learned from.
    """
    net = _network()
    state, clocks = method.init(net, 2, seed=5), []
    for x in _stream_of(2, steps=3):
        _, state = method.step(net, state, x)
        clocks.append(state.key.clock.tolist())
    assert clocks == [[1, 1], [2, 2], [3, 3]], f"after each of three steps the clocks of two streams stand at {clocks}"
    assert state.key.seed.tolist() == [5, 6], f"streams of the seeds 5 and 6 end with {state.key.seed.tolist()}"


def mutates_nothing(method: Method) -> None:
    """Catches in-place optimisers, a trained backbone, counters on the object, and changed input images."""
    net = _network()
    _, state = _play(method, net, method.init(net, 2), _stream_of(2, steps=2))
    x = images(2, 6, seed=9)
    x[0, 1] = 0  # an image that screening or clipping might touch
    kept_state, kept_x, kept_method = clone(state), x.clone(), copy.deepcopy(vars(method))
    kept_net = net.fingerprint()
    method.step(net, state, x)
    method.predict(net, state, x)
    assert digest(state) == digest(kept_state), "the step changed the state it was given"
    assert torch.equal(x, kept_x), "the step changed the images"
    assert vars(method) == kept_method, "the step changed the method"
    assert net.fingerprint() == kept_net, "the step changed the network"
    assert not any(p.requires_grad for p in net.parameters()), "the step unfroze the network"


def donating_changes_no_number(method: Method) -> None:
    """Catches a step that reads a buffer after reusing it, or that reuses the state it works on."""
    net, batches = _network(), _stream_of(2, steps=6)
    kept, kept_state = _play(method, net, method.init(net, 2), batches)
    for retire in (False, True):
        state, retired, outputs = method.init(net, 2), False, []
        for x in batches:
            before, old = digest(state), state
            y, state = method.step(net, state, x, donate=retired if retire else True)
            assert not retire or digest(old) == before, "the state was changed, although another was donated"
            outputs.append(y)
            retired = old
        assert all(torch.equal(a, b) for a, b in zip(kept, outputs, strict=True)), "predictions differ"
        assert digest(kept_state) == digest(state), "states differ"


def streams_are_independent(method: Method) -> None:
    """Catches statistics, losses, thresholds or random draws shared between streams: S together = each alone."""
    net, streams = Backbone(small_network(dtype=torch.float64)), 3
    batches = [images(streams, 6, seed, torch.float64) for seed in range(4)]
    together, state = _play(method, net, method.init(net, streams, seed=7), batches)
    for i in range(streams):
        alone, alone_state = _play(method, net, method.init(net, 1, seed=7 + i), [x[i : i + 1] for x in batches])
        for a, b in zip(together, alone, strict=True):
            assert torch.allclose(a[i], b[0], rtol=0, atol=1e-9), f"stream {i} predicts otherwise in company"
        for name, t in _adapted(stream(state, i, streams)).items():
            other = leaves(alone_state)[name]
            assert torch.allclose(t.double(), other.double(), rtol=0, atol=1e-9), f"{name} of stream {i} differs"


def saves_and_resumes(method: Method) -> None:
    """Catches anything that matters and is not in the state: half the stream, through bytes, then the rest."""
    from safetensors.torch import load, save

    net, batches = _network(), _stream_of(2)
    whole, end = _play(method, net, method.init(net, 2, seed=3), batches)
    _, middle = _play(method, net, method.init(net, 2, seed=3), batches[:2])
    blob = save({name: t.contiguous() for name, t in leaves(middle).items()})
    del middle
    resumed = rebuild(method.init(net, 2), load(blob))
    rest, resumed_end = _play(copy.deepcopy(method), Backbone(small_network()), resumed, batches[2:])
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], rest, strict=True)), "predictions differ after resuming"
    assert digest(end) == digest(resumed_end), "states differ after resuming"


def keeps_no_graph(method: Method) -> None:
    """Catches a graph that grows with the stream, be it the images' own, and a step that differs under no_grad."""
    net, batches = _network(), _stream_of(1)
    with torch.no_grad():
        quiet, quiet_state = _play(method, net, method.init(net), batches)
    with torch.enable_grad():
        outputs, state = _play(method, net, method.init(net), [x.clone().requires_grad_() for x in batches])
    for t in (*outputs, *leaves(state).values()):
        assert not t.requires_grad, "a result still carries a graph"
    assert all(torch.equal(a, b) for a, b in zip(quiet, outputs, strict=True)), "grad mode changes predictions"
    assert digest(quiet_state) == digest(state), "grad mode changes the state"


def stays_finite(method: Method) -> None:
    """Catches empty means, division by an empty class and log 0: one image, black, white, one class, poison."""
    net = _network()
    normal = images(1, 6)
    poison = normal.clone()
    poison[0, 2, 0, 3, 3], poison[0, 4] = float("nan"), float("inf")
    cases = {
        "a batch of one": normal[:, :1],
        "black images": torch.zeros_like(normal),
        "white images": torch.ones_like(normal),
        "one class only": normal[:, :1].expand_as(normal).clone(),
        "noise nothing is confident about": torch.full_like(normal, 0.5),
        "images with NaN and infinity": poison,
        "a finite value whose square is not": torch.where(poison.isfinite(), normal, 3e19),
        "nothing but NaN": torch.full_like(normal, float("nan")),
    }
    for case, x in cases.items():
        state, bad = method.init(net), 0
        for batch in (x, normal, x, x):
            y, state = method.step(net, state, batch)
            bad += int((~sound(batch)).sum())
            assert y.isfinite().all(), f"{case}: a prediction is not finite"
            assert _finite(state), f"{case}: the state is not finite"
            assert int(state.info.skipped) == bad, (
                f"{case}: {int(state.info.skipped)} images were skipped, and {bad} are bad. `finish` skips good ones "
                "where what the step made of them is not finite"
            )


def padding_weighs_nothing(method: Method) -> None:
    """Catches invalid images in a statistic, a loss or a mean, and free places of a memory: all is as without them.

    With a random augmentation an image's noise depends on its place in the batch, so the invalid ones come last.
    """
    net, watchful = _network(), _Watchful(small_network())
    clean = [images(1, 5, seed) for seed in range(3)]
    garbage = torch.full((1, 3, 3, SIZE, SIZE), 0.9)
    garbage[0, 1] = float("nan")
    _, state = _play(method, net, method.init(net), clean)
    padded = method.init(net)
    for i, x in enumerate(clean):
        valid = torch.arange(8).lt(5).unsqueeze(0)
        y, padded = method.step(watchful, padded, torch.cat((x, garbage), 1), valid)
        alone = method.predict(net, method.init(net), x) if i == 0 else None
        assert alone is None or torch.allclose(y[:, :5], alone, rtol=0, atol=1e-5), "padding changed a prediction"
    assert int(padded.info.images) == 15, "padding was counted as images"
    for name, t in _adapted(padded).items():
        assert torch.allclose(t.float(), leaves(state)[name].float(), rtol=1e-4, atol=1e-5), f"padding moved {name}"


def a_poisoned_batch_touches_nothing(method: Method) -> None:
    """Catches a clock, an optimiser step or a statistic that moves although there was nothing to see."""
    net = _network()
    _, state = _play(method, net, method.init(net, 2), _stream_of(2, steps=2))
    x = images(2, 6, seed=5)
    x[0] = float("nan")
    _, after = method.step(net, state, x)
    mine, kept = stream(after, 0, 2), stream(state, 0, 2)
    assert int(mine.info.skipped) == int(kept.info.skipped) + 6, "the skipped images were not counted"
    still = mine._replace(info=mine.info._replace(skipped=kept.info.skipped))
    assert digest(still) == digest(kept), "a batch of nothing but NaN moved the state"
    assert int(after.info.images[1]) == int(state.info.images[1]) + 6, "the healthy stream was held back"


def says_nothing_of_what_does_not_count(method: Method) -> None:
    """Catches raw predictions of padding, or of images that are not finite: theirs is the same for every class."""
    net = _network()
    _, state = _play(method, net, method.init(net, 2), _stream_of(2, steps=2))
    x = images(2, 6, seed=5)
    x[0, 2, 0, 3, 3], x[1] = float("nan"), float("inf")
    real = torch.arange(6).lt(5).expand(2, 6)
    for valid in (None, real):
        silent = ~x.isfinite().flatten(2).all(2) | (~real if valid is not None else False)
        for what, y in (
            ("step", method.step(net, state, x, valid)[0]),
            ("predict", method.predict(net, state, x, valid)),
        ):
            assert bool((y.amax(-1) == y.amin(-1))[silent].all()), (
                f"{what} prefers a class for an image that is not finite, or padding; expected equal predictions, see "
                "`quiet` in tribe.methods.base"
            )


def batch_size_may_change(method: Method) -> None:
    """Catches shapes remembered from the first batch."""
    net = _network()
    state = method.init(net)
    for size in (6, 1, 9, 3):
        y, state = method.step(net, state, images(1, size, size))
        assert y.shape == (1, size, CLASSES), f"{size} images gave {tuple(y.shape)}"


def cost_does_not_grow(method: Method) -> None:
    """Catches a state that grows with the stream, or changes its precision on the way."""
    for dtype in (torch.float32, torch.float64):
        net = Backbone(small_network(dtype=dtype))
        start = method.init(net)
        _, end = _play(method, net, start, [images(1, 6, seed, dtype) for seed in range(6)])
        before, after = leaves(start), leaves(end)
        assert before.keys() == after.keys(), f"the state lost or gained {sorted(before.keys() ^ after.keys())}"
        for name, t in before.items():
            was, became = (f"{tuple(u.shape)} of {u.dtype}" for u in (t, after[name]))
            assert was == became, f"{name} of the state was {was} and after six batches is {became}"


def adapts(method: Method) -> None:
    """Catches a method that does nothing, and one that says it does nothing and does something."""
    net = _network()
    start = method.init(net)
    x = images(1, 24, seed=1)
    _, state = _play(method, net, start, [images(1, 24, seed) * 0.3 for seed in range(8)])
    changed = not torch.equal(method.predict(net, start, x), method.predict(net, state, x))
    if method.does_not_adapt is None:
        assert changed, "eight batches changed no prediction"
    else:
        assert not changed, f"it says {method.does_not_adapt!r}, but predictions changed"


SMALL = "Say in `small`, on the class, with which of its fields a few images are enough: see tribe.testing.small"


def a_few_images_are_enough(method: Method) -> None:
    """Catches a method that every other check sees idle: what moves in a long stream moves in the shortest, too.

    And a memory, if there is one, has had to choose whom to hold.
    """
    net = _network()
    start = method.init(net)
    before, moved = _adapted(start), []
    for batches in ([images(1, 24, seed) for seed in range(8)], _stream_of(1, steps=2)):
        _, end = _play(method, net, start, batches)
        moved.append({name for name, t in _adapted(end).items() if not torch.equal(t, before[name])})
    later = sorted(moved[0] - moved[1])
    assert not later, (
        f"{', '.join(later)} of the state moved in 192 images and not in 12, so that most checks would see nothing of "
        f"it. {SMALL}"
    )
    for memory in end:
        if isinstance(memory, Timely | Reservoir) and bool(memory.arrivals.any()):
            assert bool((memory.held < memory.arrivals).all()), f"its memory could hold all of 12 images. {SMALL}"


def prediction_comes_before_learning(method: Method) -> None:
    """Catches a step that has seen the batch it predicts, or a predict that disagrees with step."""
    net = _network()
    _, state = _play(method, net, method.init(net), _stream_of(1, steps=2))
    x = images(1, 6, seed=8)
    y, _ = method.step(net, state, x)
    assert torch.allclose(y, method.predict(net, state, x), rtol=0, atol=1e-5), "step and predict disagree"


def predicts_with_what_it_deploys(method: Method) -> None:
    """Catches a `deployed` other than the network that predicts, and a correction of its predictions that goes unsaid.

    What is exported is the network `deployed` describes.
    """
    net = Backbone(small_network(dtype=torch.float64))
    _, state = _play(method, net, method.init(net, 2), [images(2, 6, seed, torch.float64) for seed in range(4)])
    x = images(2, 6, 8, torch.float64)
    passed = method.deployed(net, state).logits(net, x, torch.ones(2, 6, dtype=torch.bool))
    predicted = method.predict(net, state, x)
    gap = (passed - predicted).abs().max().item()
    if method.more_than_a_pass is None:
        assert gap <= 1e-9, (
            f"a pass of the network that deployed describes is up to {gap:.2g} away from what predict predicts. If "
            "predict is meant to do more, more_than_a_pass says what"
        )
    else:
        assert gap > 1e-9, f"it says {method.more_than_a_pass!r}, but a pass of deployed predicts the same"


def is_documented(method: Method) -> None:
    """Catches a method without an idea, a paper or a name."""
    cls = type(method)
    module = inspect.getmodule(cls)
    assert cls.__doc__, "the class has no docstring"
    assert module is None or module.__name__ == "__main__" or module.__doc__, "the module has no docstring"
    assert getattr(cls, "paper", ""), "no paper"
    assert getattr(cls, "name", ""), "not registered: no name"


METHOD_CHECKS: tuple[Callable[[Method], None], ...] = (
    never_sees_labels,
    is_deterministic,
    leaves_global_random_state_alone,
    its_clock_ticks,
    mutates_nothing,
    donating_changes_no_number,
    streams_are_independent,
    saves_and_resumes,
    keeps_no_graph,
    stays_finite,
    padding_weighs_nothing,
    a_poisoned_batch_touches_nothing,
    says_nothing_of_what_does_not_count,
    batch_size_may_change,
    cost_does_not_grow,
    adapts,
    a_few_images_are_enough,
    prediction_comes_before_learning,
    predicts_with_what_it_deploys,
    is_documented,
)


# -- norms ----------------------------------------------------------------------------------------------------------


def _moments(norm: Norm, rows: int = 3, batch: int = 7, channels: int = 5) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(rows, batch, channels, generator=generator, dtype=torch.float64)
    var = torch.rand(rows, batch, channels, generator=generator, dtype=torch.float64) + 0.1
    stats_mean = torch.randn(rows, norm.classes, channels, generator=generator, dtype=torch.float64)
    stats_var = torch.rand(rows, norm.classes, channels, generator=generator, dtype=torch.float64) + 0.5
    labels = torch.randint(norm.classes, (rows, batch), generator=generator)
    valid = torch.rand(rows, batch, generator=generator) > 0.2
    return mean, var, stats_mean, stats_var, labels, valid


def _apply(norm: Norm, mean: Tensor, var: Tensor, m: Tensor, v: Tensor, labels: Tensor, valid: Tensor) -> list[Tensor]:
    out_mean, out_var, kept = norm(mean, var, 9, Stats(m, v), labels, valid, 1e-5)
    return [out_mean, out_var, *kept]


def _close(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=0, atol=1e-10) for x, y in zip(a, b, strict=True))


def order_in_the_batch_does_not_matter(norm: Norm) -> None:
    """Catches a rule that favours the first sample of a class."""
    mean, var, m, v, labels, valid = _moments(norm)
    order = torch.arange(mean.shape[1]).flip(0)  # backwards: the first of each class becomes the last
    plain = _apply(norm, mean, var, m, v, labels, valid)
    mixed = _apply(norm, mean[:, order], var[:, order], m, v, labels[:, order], valid[:, order])
    plain[:2] = [t[:, order] if t.shape[1] == len(order) else t for t in plain[:2]]
    assert _close(plain, mixed), "the order of the batch changes the statistics"


def rows_are_independent(norm: Norm) -> None:
    """Catches statistics pooled over rows: streams or branches that meet."""
    args = _moments(norm)
    together = _apply(norm, *args)
    for i in range(len(args[0])):
        alone = _apply(norm, *(t[i : i + 1] for t in args))
        assert _close([t[i : i + 1] for t in together], alone), f"row {i} differs in company"


def invalid_samples_weigh_nothing(norm: Norm) -> None:
    """Catches padding in a statistic."""
    mean, var, m, v, labels, valid = _moments(norm, rows=1)
    keep = valid[0]
    without = _apply(norm, mean[:, keep], var[:, keep], m, v, labels[:, keep], valid[:, keep])
    with_them = _apply(norm, mean, var, m, v, labels, valid)
    with_them[:2] = [t[:, keep] if t.shape[1] == len(keep) else t for t in with_them[:2]]
    assert _close(with_them, without), "an invalid sample changed a statistic"


def nothing_valid_keeps_the_statistics(norm: Norm) -> None:
    """Catches a division by an empty batch."""
    mean, var, m, v, labels, valid = _moments(norm)
    out = _apply(norm, mean, var, m, v, labels, torch.zeros_like(valid))
    assert all(bool(t.isfinite().all()) for t in out), "an empty batch makes statistics that are not finite"
    assert _close(out[2:], [m, v]), "an empty batch moved the statistics"


def changes_no_argument(norm: Norm) -> None:
    """Catches a rule that writes into the statistics it is given."""
    args = _moments(norm)
    kept = [t.clone() for t in args]
    _apply(norm, *args)
    assert all(torch.equal(a, b) for a, b in zip(args, kept, strict=True)), "the rule changed its arguments"


def gradients_are_right(norm: Norm) -> None:
    """Catches a rule that detaches the batch's share of the statistics, or lets the past carry a gradient."""
    if not norm.observes:
        return
    mean, var, m, v, labels, valid = _moments(norm, rows=2, batch=4, channels=2)
    mean.requires_grad_()
    var.requires_grad_()

    def outputs(mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        return norm(mean, var, 9, Stats(m, v), labels, valid, 1e-5)[:2]

    assert any(t.requires_grad for t in outputs(mean, var)), "no gradient flows through the batch's share"
    assert torch.autograd.gradcheck(outputs, (mean, var)), "gradcheck"
    kept = norm(mean, var, 9, Stats(m, v), labels, valid, 1e-5)[2]
    assert not any(t.requires_grad for t in kept), "the statistics to keep carry a graph"


NORM_CHECKS: tuple[Callable[[Norm], None], ...] = (
    order_in_the_batch_does_not_matter,
    rows_are_independent,
    invalid_samples_weigh_nothing,
    nothing_valid_keeps_the_statistics,
    changes_no_argument,
    gradients_are_right,
)


# -- scenarios ------------------------------------------------------------------------------------------------------

PER_CLASS = 120  # images of each of the 4 classes in each domain: a long tail of 100 leaves none empty


def label_sets(scenario: Scenario) -> list[Tensor]:
    """Labels of every base domain, each in a file order of its own."""
    count = 3 if scenario.domains is None else len(scenario.domains)
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(CLASSES * PER_CLASS, generator=generator) % CLASSES for _ in range(count)]


def _draws(scenario: Scenario) -> list[tuple[Scenario, Schedule]]:
    """The scenario with the released sampler and with the paper's draw, and a stream of each."""
    both = [dataclasses.replace(scenario, draw=draw) for draw in ("released", "paper")]
    return [(each, each.schedule(label_sets(each), seed=5)) for each in both]


def _times_visited(scenario: Scenario) -> Tensor:
    """How often the scenario visits each domain number."""
    bases = label_sets(scenario)
    visits = [visit.domain for visit in scenario.visits(range(len(bases)))]
    return torch.bincount(torch.tensor(visits), minlength=len(scenario.expand(bases)))


def is_plain_data(scenario: Scenario) -> None:
    """Catches a schedule that cannot be saved as it is: other types, columns of different lengths, nothing in it."""
    for _, schedule in _draws(scenario):
        types = [t.dtype for t in schedule]
        assert types == [torch.int64, torch.int64, torch.bool], f"the columns are {types}"
        assert len({t.shape for t in schedule}) == 1, "the columns have different lengths"
        assert schedule.index.ndim == 1, "the columns have more than one axis"
        assert len(schedule.index), "the stream is empty"


def indices_are_valid(scenario: Scenario) -> None:
    """Catches a domain or an image that does not exist, and an image played twice in one visit."""
    for each, schedule in _draws(scenario):
        labels = each.expand(label_sets(each))
        assert 0 <= int(schedule.domain.min()) <= int(schedule.domain.max()) < len(labels), "there is no such domain"
        sizes = torch.tensor([len(y) for y in labels])
        assert bool(((schedule.index >= 0) & (schedule.index < sizes[schedule.domain])).all()), "no such image"
        most = int(sizes.max())
        played = torch.bincount(schedule.domain * most + schedule.index, minlength=len(labels) * most)
        often = played.reshape(len(labels), -1).amax(1)
        assert bool((often <= _times_visited(each)).all()), "an image plays twice in one visit"


def counts_match_the_profile(scenario: Scenario) -> None:
    """Catches images lost or invented on the way from the class profile to the stream."""
    for each, schedule in _draws(scenario):
        if isinstance(each.profile, Natural):
            wanted = torch.full((CLASSES,), PER_CLASS)
        elif isinstance(each.profile, LongTail):
            wanted = torch.from_numpy(each.profile.counts(CLASSES, CLASSES * PER_CLASS, each.draw))
        else:
            continue  # a profile from elsewhere: what it keeps is its own affair
        counts = class_counts(schedule, each.expand(label_sets(each)), CLASSES)
        if getattr(each.profile, "varying", False):
            counts = counts.sort(1, descending=True).values
        assert torch.equal(counts, _times_visited(each)[:, None] * wanted), (
            f"the classes have {counts.tolist()} samples"
        )


def same_seed_same_schedule(scenario: Scenario) -> None:
    """Catches the global random generators, used or moved, anything kept on the object, and a seed without effect."""
    for each, schedule in _draws(scenario):
        with _generators_stay():
            again = copy.deepcopy(each).schedule(label_sets(each), seed=5)
            another = digest(each.schedule(label_sets(each), seed=6))
        assert digest(schedule) == digest(again), "equal seeds make different streams"
        if each.same_for_all_seeds is None:
            assert digest(schedule) != another, "the seed changes nothing"
        else:
            assert digest(schedule) == another, f"it says {each.same_for_all_seeds!r}, but the seed changes the stream"


def leaves_labels_alone(scenario: Scenario) -> None:
    """Catches a sampler that shuffles the labels it is given in place."""
    labels = label_sets(scenario)
    scenario.schedule(labels, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(labels, label_sets(scenario), strict=True)), "labels changed"


SCENARIO_CHECKS: tuple[Callable[[Scenario], None], ...] = (
    is_plain_data,
    indices_are_valid,
    counts_match_the_profile,
    same_seed_same_schedule,
    leaves_labels_alone,
)


# -- data sets ------------------------------------------------------------------------------------------------------

LOOKED_AT = 7  # images of a domain that the checks read


def _some(dataset: Dataset, domain: str) -> Tensor:
    """Positions from the first image of a domain to the last."""
    count = len(dataset.labels(domain))
    return torch.linspace(0, count - 1, min(count, LOOKED_AT)).long()


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal, an image of NaN being equal to another."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def names_are_different(dataset: Dataset) -> None:
    """Catches a data set without domains, and two classes or domains of one name."""
    assert len(dataset.domains), "there are no domains"
    for what, names in (("class", dataset.classes), ("domain", dataset.domains)):
        assert all(isinstance(name, str) and name for name in names), f"a {what} has no name"
        assert len(set(names)) == len(names), f"a {what} is named twice"


def labels_fit_the_classes(dataset: Dataset) -> None:
    """Catches labels of another type or shape, out of range, or other ones when asked again."""
    for domain in dataset.domains:
        y = dataset.labels(domain)
        assert (y.dtype, y.ndim) == (torch.int64, 1), f"labels of {domain} are {y.dtype} of shape {tuple(y.shape)}"
        assert len(y), f"{domain} has no images"
        assert -1 <= int(y.min()) <= int(y.max()) < len(dataset.classes), (
            f"labels of {domain} are {int(y.min())} to {int(y.max())}; there are {len(dataset.classes)} classes"
        )
        assert torch.equal(y, dataset.labels(domain)), f"labels of {domain} change"


def images_are_in_range(dataset: Dataset) -> None:
    """Catches bytes, 0 to 255, channels last, too many images or too few, domains of different sizes, a NaN pixel."""
    shapes = set()
    for domain in dataset.domains:
        index = _some(dataset, domain)
        x = dataset.images(domain, index)
        assert x.dtype == torch.float32, f"images of {domain} are {x.dtype}"
        shape = tuple(x.shape)
        assert shape[0] == len(index), f"{len(index)} images of {domain} were asked for, and {shape[0]} came"
        assert shape[1:2] in ((1,), (3,)), f"images of {domain} have shape {shape}; expected 1 or 3 channels first"
        assert len(shape) == 4, f"images of {domain} have shape {shape}; expected (n, C, H, W)"
        unreadable = x.isnan().flatten(1).all(1)
        assert bool(((x >= 0) & (x <= 1)).flatten(1).all(1).logical_or(unreadable).all()), (
            f"images of {domain} reach beyond 0 to 1"
        )
        shapes.add(x.shape[1:])
    assert len(shapes) == 1, f"images have different shapes: {sorted(shapes)}"


def order_of_reading_does_not_matter(dataset: Dataset) -> None:
    """Catches an image that depends on its neighbours, on its place in the batch, or on what was read before."""
    for domain in dataset.domains:
        index = _some(dataset, domain)
        together = dataset.images(domain, index)
        backwards = torch.cat([dataset.images(domain, index[i : i + 1]) for i in reversed(range(len(index)))])
        assert _same(together, backwards.flip(0)), f"an image of {domain} differs when it is read alone"
        mixed = torch.arange(len(index)).roll(1).repeat(2)
        assert _same(together[mixed], dataset.images(domain, index[mixed])), (
            f"images of {domain} differ in another order, or twice in one batch"
        )


def reading_again_gives_the_same(dataset: Dataset) -> None:
    """Catches global random generators, used or moved, and memory that the caller can spoil, or the index changed."""
    for domain in dataset.domains:
        index = _some(dataset, domain)
        kept, copies = index.clone(), []
        for seed in (1, 2):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            with _generators_stay():
                x = dataset.images(domain, index)
            assert torch.equal(index, kept), "the index was changed"
            copies.append(x.clone())
            x.fill_(0.5)  # whoever gets images may write into them
        assert _same(*copies), f"images of {domain} differ when they are read again"


def what_is_not_there_is_refused(dataset: Dataset) -> None:
    """Catches a domain that falls back to another, and positions beyond the end, or counted from it."""
    for ask in (dataset.labels, lambda domain: dataset.images(domain, torch.tensor([0]))):
        assert _refused(ask, "no such domain"), "a domain that does not exist was read"
    for domain in dataset.domains:
        for beyond in (len(dataset.labels(domain)), -1):
            assert _refused(dataset.images, domain, torch.tensor([0, beyond])), f"{domain} has an image {beyond}"


def _refused(ask: Callable[..., Any], *request: Any) -> bool:
    try:
        ask(*request)
    except (ValueError, LookupError):
        return True
    return False


DATASET_CHECKS: tuple[Callable[[Dataset], None], ...] = (
    names_are_different,
    labels_fit_the_classes,
    images_are_in_range,
    order_of_reading_does_not_matter,
    reading_again_gives_the_same,
    what_is_not_there_is_refused,
)


def check_method(method: Method) -> None:
    """Hold a method (built with classes=4) to the whole contract; AssertionError says which property fails."""
    for check in METHOD_CHECKS:
        _hold(check, small(method))


def check_norm(norm: Norm) -> None:
    """Hold a norm rule to its contract."""
    for check in NORM_CHECKS:
        _hold(check, norm)


def check_scenario(scenario: Scenario) -> None:
    """Hold a scenario to its contract."""
    for check in SCENARIO_CHECKS:
        _hold(check, scenario)


def check_dataset(dataset: Dataset) -> None:
    """Hold a data set to its contract; a few images of every domain are read."""
    for check in DATASET_CHECKS:
        _hold(check, dataset)


def _hold(check: Callable[[Any], None], component: Any) -> None:
    try:
        check(component)
    except AssertionError as error:
        raise AssertionError(f"{component!r} fails {check.__name__}: {error}") from error


__all__ = [
    "DATASET_CHECKS",
    "METHOD_CHECKS",
    "NORM_CHECKS",
    "SCENARIO_CHECKS",
    "check_dataset",
    "check_method",
    "check_norm",
    "check_scenario",
    "images",
    "informed",
    "label_sets",
    "ready",
    "small",
    "small_network",
]
