"""The contract of methods. A check is named for the property it asserts; its docstring names the bug it catches."""

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tribe.core.backbone import Backbone, Output
from tribe.core.memory import Reservoir, Timely
from tribe.core.state import clone, digest, hash_tensors, leaves, stream
from tribe.core.validation import are_probabilities, good_images
from tribe.methods import AnyMethod, Pipeline
from tribe.testing import shared
from tribe.testing.shared import CLASSES, SIZE, doubtful_network, images, mixed_images, small_backbone, small_network


class _StrictBackbone(Backbone):
    """A network that refuses to count an image twice, and returns arbitrary logits for images that are not valid."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Output:
        valid = inspect.signature(Backbone.forward).bind(self, x, *args, **kwargs).arguments.get("valid")
        counted = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
        for row, mask in zip(x.detach(), counted, strict=True):
            distinct = row[mask].unique(dim=0)
            assert len(distinct) == int(mask.sum()), (
                "a pass counts an image twice: the copy that replaces padding, or that fills a free place of the memory"
            )
        output = super().forward(x, *args, **kwargs)
        arbitrary = torch.linspace(-3, 3, output.logits.shape[-1], dtype=output.logits.dtype)
        features = None if output.features is None else output.features.where(counted.unsqueeze(-1), 3.0)
        return output._replace(logits=output.logits.where(counted.unsqueeze(-1), arbitrary), features=features)


def _play(method: AnyMethod, net: Backbone, state: Any, batches: Iterable[Tensor]) -> shared.Played:
    outputs = []
    for x in batches:
        y, state = method.step(net, state, x)
        outputs.append(y)
    return shared.Played(outputs, state)


def _batches(streams: int, steps: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [images(streams, 6, seed, dtype) for seed in range(steps)]


def _in_doubt(steps: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Backbone, list[Tensor]]:
    """Return a network, and batches of a stream that it is certain of, of one that it is not, and of one between."""
    return Backbone(doubtful_network(dtype)), [mixed_images(3, 6, seed, dtype) for seed in range(steps)]


def _started(
    method: AnyMethod, streams: int = 1, steps: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Backbone, Any]:
    net = small_backbone(dtype)
    return net, _play(method, net, method.init(net, streams), _batches(streams, steps, dtype)).state


def _adapted(state: Any) -> dict[str, Tensor]:
    """Return the tensors of a state that can change predictions: all but `key` and `info`."""
    return {name: t for name, t in leaves(state).items() if not {"key", "info"} & set(name.split("."))}


def never_sees_labels(method: AnyMethod) -> None:
    """Catches a method that takes labels or domains, under any name."""
    names = list(inspect.signature(method.step).parameters)
    allowed = ["net", "state", "x", "valid", "retired"]
    others = set(names[5:]) - {"deploy", "on_prediction"}
    assert names[:5] == allowed, f"step takes {names}; expected {allowed}"
    assert not others, f"step takes {sorted(others)}; expected only {allowed}, deploy and on_prediction"


def stays_on_the_device_of_its_images(method: AnyMethod) -> None:
    """Catches `.cuda()`, and any device that is named in place of the images' own, also where there is no GPU."""
    net, (x, *_) = small_backbone(), _batches(2)
    with shared.one_device(x.device):
        _, state = method.step(net, method.init(net, 2), x)
        method.predict(net, state, x)


def is_deterministic(method: AnyMethod) -> None:
    """Catches draws from torch's, numpy's or Python's global generator, and anything kept outside the state."""
    net, batches, runs = small_backbone(), _batches(2), []
    for seed in (1, 2):
        shared.seed_generators(seed)
        with shared.generators_stay():
            runs.append(_play(method, net, method.init(net, 2, seed=5), batches))
            method.predict(net, runs[-1].state, batches[0])
    shared.require_same(runs[0], runs[1], "between equal runs")


def its_clock_ticks(method: AnyMethod) -> None:
    """Catches a clock that does not advance, so that every step draws the same numbers, and a seed that changes.

    It also holds for methods that draw nothing: the clock is the number of batches that a stream reports.
    """
    net = small_backbone()
    state, clocks = method.init(net, 2, seed=5), []
    for x in _batches(2, steps=3):
        _, state = method.step(net, state, x)
        clocks.append(state.key.clock.tolist())
    assert clocks == [[1, 1], [2, 2], [3, 3]], f"the clocks of two streams after each of three steps are {clocks}"
    assert state.key.seed.tolist() == [5, 6], f"seeds 5 and 6 became {state.key.seed.tolist()}"


def mutates_nothing(method: AnyMethod) -> None:
    """Catches in-place optimisers, a trained backbone, counters on the object, and changed input images."""
    net, state = _started(method, 2)
    x = images(2, 6, seed=9)
    x[0, 1] = 0  # an image that screening or clipping might touch
    old_state, old_x, old_method = clone(state), x.clone(), copy.deepcopy(vars(method))
    old_net = net.fingerprint()
    method.step(net, state, x)
    method.predict(net, state, x)
    assert digest(state) == digest(old_state), "the step changed the state it was given"
    assert torch.equal(x, old_x), "the step changed the images"
    assert vars(method) == old_method, "the step changed the method"
    assert net.fingerprint() == old_net, "the step changed the network"
    assert not any(p.requires_grad for p in net.parameters()), "the step unfroze the network"


def reusing_memory_changes_no_number(method: AnyMethod) -> None:
    """Catches a step that reads the memory it reuses, or that reuses the memory of the state it was given."""
    net, batches = _in_doubt()
    method = shared.informed(method, net)
    expected = _play(method, net, method.init(net, 3), batches)
    state, retired, outputs = method.init(net, 3), None, []
    for x in batches:
        before, old = digest(state), state
        y, state = method.step(net, state, x, retired=retired)
        assert digest(old) == before, "the step changed its state, although another one was retired"
        outputs.append(y)
        retired = old
    shared.require_same(expected, shared.Played(outputs, state), "where memory is used again")


def streams_are_independent(method: AnyMethod) -> None:
    """Catches statistics, losses, thresholds, decisions or draws shared between streams: S together = each alone."""
    (net, batches), streams = _in_doubt(dtype=torch.float64), 3
    method = shared.informed(method, net)
    together, state = _play(method, net, method.init(net, streams, seed=7), batches)
    for i in range(streams):
        alone, alone_state = _play(method, net, method.init(net, 1, seed=7 + i), [x[i : i + 1] for x in batches])
        for a, b in zip(together, alone, strict=True):
            assert torch.allclose(a[i], b[0], rtol=0, atol=1e-9), f"stream {i} differs when it is alone"
        for name, t in _adapted(stream(state, i, streams)).items():
            other = leaves(alone_state)[name]
            assert torch.allclose(t.double(), other.double(), rtol=0, atol=1e-9), f"{name} of stream {i} differs"


def saves_and_resumes(method: AnyMethod) -> None:
    """Catches anything outside the state that a step depends on: the state is saved in mid-stream and loaded."""
    net, batches = small_backbone(), _batches(2)
    whole = _play(method, net, method.init(net, 2, seed=3), batches)
    middle = _play(method, net, method.init(net, 2, seed=3), batches[:2]).state
    resumed = shared.saved_and_loaded(middle, method.init(net, 2))
    rest = _play(copy.deepcopy(method), small_backbone(), resumed, batches[2:])
    shared.require_same(whole._replace(outputs=whole.outputs[2:]), rest, "after resuming")


def keeps_no_graph(method: AnyMethod) -> None:
    """Catches an autograd graph that grows with the stream, and a step that differs under no_grad."""
    net, batches = small_backbone(), _batches(1)
    with torch.no_grad():
        plain = _play(method, net, method.init(net), batches)
    with torch.enable_grad():
        traced = _play(method, net, method.init(net), [x.clone().requires_grad_() for x in batches])
    shared.require_no_graph(*traced.outputs, *leaves(traced.state).values())
    shared.require_same(plain, traced, "with gradients and without")


def stays_finite(method: AnyMethod) -> None:
    """Catches empty means, division by an empty class and log 0: one image, black, white, one class, NaN."""
    net = small_backbone()
    normal = images(1, 6)
    broken = normal.clone()
    broken[0, 2, 0, 3, 3], broken[0, 4] = float("nan"), float("inf")
    cases = {
        "a batch of one": normal[:, :1],
        "black images": torch.zeros_like(normal),
        "white images": torch.ones_like(normal),
        "one class only": normal[:, :1].expand_as(normal).clone(),
        "gray images": torch.full_like(normal, 0.5),
        "images with NaN and infinity": broken,
        "a finite value whose square is not": torch.where(broken.isfinite(), normal, 3e19),
        "nothing but NaN": torch.full_like(normal, float("nan")),
    }
    for case, x in cases.items():
        state, bad = method.init(net), 0
        for batch in (x, normal, x, x):
            y, state = method.step(net, state, batch)
            bad += int((~good_images(batch)).sum())
            assert y.isfinite().all(), f"{case}: a prediction is not finite"
            assert shared.is_finite(state), f"{case}: the state is not finite"
            assert int(state.info.skipped) == bad, (
                f"{case}: {int(state.info.skipped)} images were skipped, and {bad} are bad. `commit_step` also skips "
                "good images if the step's results for them are not finite"
            )


def padding_weighs_nothing(method: AnyMethod) -> None:
    """Catches invalid images, or free places of a memory, that enter a statistic, a loss or a mean.

    The invalid images come last, because the noise of a random augmentation depends on the place in the batch.
    """
    net, strict = small_backbone(), _StrictBackbone(small_network())
    clean = [images(1, 5, seed) for seed in range(3)]
    garbage = torch.full((1, 3, 3, SIZE, SIZE), 0.9)
    garbage[0, 1] = float("nan")
    _, state = _play(method, net, method.init(net), clean)
    padded = method.init(net)
    for i, x in enumerate(clean):
        valid = torch.arange(8).lt(5).unsqueeze(0)
        y, padded = method.step(strict, padded, torch.cat((x, garbage), 1), valid)
        alone = method.predict(net, method.init(net), x) if i == 0 else None
        assert alone is None or torch.allclose(y[:, :5], alone, rtol=0, atol=1e-5), "padding changed a prediction"
    assert int(padded.info.images) == 15, "padding was counted as images"
    for name, t in _adapted(padded).items():
        alone = leaves(state)[name].float()
        # Gradients of inverses round by shares of their largest entry.
        room = max(1e-5, 1e-4 * float(alone.abs().max()))
        assert torch.allclose(t.float(), alone, rtol=1e-4, atol=room), f"padding moved {name}"


def a_poisoned_batch_touches_nothing(method: AnyMethod) -> None:
    """Catches a clock, an optimiser or a statistic that moves although no image was valid."""
    net, state = _started(method, 2)
    x = images(2, 6, seed=5)
    x[0] = float("nan")
    _, end = method.step(net, state, x)
    new, old = stream(end, 0, 2), stream(state, 0, 2)
    assert int(new.info.skipped) == int(old.info.skipped) + 6, "the skipped images were not counted"
    before, after = leaves(old), leaves(new)  # NaN equals NaN
    same = {name for name, t in after.items() if hash_tensors({"": t}) == hash_tensors({"": before[name]})}
    moved = sorted(name for name in after.keys() - same if not name.endswith("info.skipped"))
    assert not moved, f"a batch of nothing but NaN moved the state: {', '.join(moved)}"
    assert int(end.info.images[1]) == int(state.info.images[1]) + 6, "the other stream did not learn"


def says_nothing_of_what_does_not_count(method: AnyMethod) -> None:
    """Catches raw predictions of padding, or of images that are not finite: their logits must be equal."""
    net, state = _started(method, 2)
    x = images(2, 6, seed=5)
    x[0, 2, 0, 3, 3], x[1] = float("nan"), float("inf")
    bad, padding = ~x.isfinite().flatten(2).all(2), torch.arange(6).eq(5).expand(2, 6)
    for valid, ignored in ((None, bad), (~padding, bad | padding)):
        for verb, y in (
            ("step", method.step(net, state, x, valid)[0]),
            ("predict", method.predict(net, state, x, valid)),
        ):
            assert bool((y.amax(-1) == y.amin(-1))[ignored].all()), (
                f"{verb} prefers a class for padding, or for an image that is not finite; expected equal ones, see "
                "tribe.methods.mask_logits"
            )


def batch_size_may_change(method: AnyMethod) -> None:
    """Catches shapes remembered from the first batch."""
    net = small_backbone()
    state = method.init(net)
    for size in (6, 1, 9, 3):
        y, state = method.step(net, state, images(1, size, size))
        assert y.shape == (1, size, CLASSES), f"{size} images gave {tuple(y.shape)}"


def cost_does_not_grow(method: AnyMethod) -> None:
    """Catches a state that grows with the stream, or changes its precision."""
    for dtype in (torch.float32, torch.float64):
        net = small_backbone(dtype)
        start = method.init(net)
        shared.require_same_layout(start, _play(method, net, start, _batches(1, dtype=dtype)).state)


def adapts(method: AnyMethod) -> None:
    """Catches a method that does not adapt, and one that adapts but sets `does_not_adapt`."""
    net = small_backbone()
    start = method.init(net)
    x = images(1, 24, seed=1)
    _, state = _play(method, net, start, [images(1, 24, seed) * 0.3 for seed in range(8)])
    changed = not torch.equal(method.predict(net, start, x), method.predict(net, state, x))
    if method.does_not_adapt is None:
        assert changed, "eight batches changed no prediction"
    else:
        assert not changed, f"does_not_adapt is {method.does_not_adapt!r}, but predictions changed"


SMALL = "Declare in `small`, on the class, the fields with which a few images are enough: see tribe.testing.small"


def a_few_images_are_enough(method: AnyMethod) -> None:
    """Catches a method that does nothing in the other checks: what moves in a long stream moves in a short one too.

    If there is a memory, more images have arrived than it holds.
    """
    net = small_backbone()
    start = method.init(net)
    before, moved = _adapted(start), []
    for batches in ([images(1, 24, seed) for seed in range(8)], _batches(1, steps=2)):
        _, end = _play(method, net, start, batches)
        moved.append({name for name, t in _adapted(end).items() if not torch.equal(t, before[name])})
    # A guard's alarms and last good state need hundreds of images; they have tests of their own.
    later = sorted(name for name in moved[0] - moved[1] if "guard" not in name.split("."))
    assert not later, (
        f"{', '.join(later)} of the state moved in 192 images and not in 12, so most checks do not test it. {SMALL}"
    )
    for memory in end:
        if isinstance(memory, Timely | Reservoir) and bool(memory.arrivals.any()):
            assert bool((memory.held < memory.arrivals).all()), f"its memory holds all of 12 images. {SMALL}"


def prediction_comes_before_learning(method: AnyMethod) -> None:
    """Catches a step that learns from a batch before it predicts it, and a predict that disagrees with step."""
    net, state = _started(method)
    x = images(1, 6, seed=8)
    y, _ = method.step(net, state, x)
    assert torch.allclose(y, method.predict(net, state, x), rtol=0, atol=1e-5), "step and predict disagree"


def predicts_with_what_it_deploys(method: AnyMethod) -> None:
    """Catches a `deployed` that is not the network that predicts, and a wrong `not_exportable_because`.

    The network of `deployed` is the one that is exported.
    """
    net, state = _started(method, 2, 4, torch.float64)
    x = images(2, 6, 8, torch.float64)
    passed = method.deployed(net, state).logits(net, x, torch.ones(2, 6, dtype=torch.bool))
    predicted = method.predict(net, state, x)
    gap = (passed - predicted).abs().max().item()
    if method.not_exportable_because is None:
        assert gap <= 1e-9, (
            f"predict differs from a pass of the network in deployed by up to {gap:.2g}. If predict does more than "
            "that pass, describe it in not_exportable_because"
        )
    elif Pipeline.of(method).filter is None:  # a filter changes predictions only once it is on: see filter_checks
        assert gap > 1e-9, f"a pass of deployed predicts the same, in spite of {method.not_exportable_because!r}"


def returns_logits(method: AnyMethod) -> None:
    """Catches probabilities in place of logits: every method's answer takes a softmax."""
    (net, state), batches = _started(method), _batches(1)
    for y in (*_play(method, net, state, batches).outputs, method.predict(net, state, batches[0])):
        assert not are_probabilities(y), "the method returns probabilities: return their logarithms"


def is_documented(method: AnyMethod) -> None:
    """Catches a method without a docstring, a paper or a name."""
    shared.require_documentation(type(Pipeline.of(method).method))


METHOD_CHECKS = shared.checks_of(globals())
