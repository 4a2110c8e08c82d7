"""RoTTA and NOTE: when they update, from what, and what is refused; the recorded numbers are in test_goldens.py."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
import tribe
from tribe import norms
from tribe.core.backbone import Backbone
from tribe.core.memory import add_reservoir
from tribe.core.memory import images as pictures
from tribe.core.optim import adam_init, adam_step
from tribe.core.rules import Frozen
from tribe.core.state import Affine, leaves, stream
from tribe.methods.note import Note
from tribe.methods.rotta import Rotta
from tribe.norms.batch import Robust
from tribe.testing import CLASSES, images, small_network


def flipped(x: Tensor) -> Tensor:
    return 0.9 * x.flip(-1) + 0.05


def network(dtype: torch.dtype = torch.float64) -> Backbone:
    """The contract's network with a classifier that predicts all classes, so that memories have something to decide."""
    model = small_network(dtype=torch.float64)
    with torch.no_grad():
        model[-1].bias -= model(shots(200, seed=1)[0]).mean(0)
    return Backbone(model.to(dtype))


def rotta(**fields: Any) -> Rotta:
    return Rotta(**{"classes": CLASSES, "size": 10, "every": 10, "room": 192, "augment": flipped, **fields})


def note(**fields: Any) -> Note:
    return Note(**{"classes": CLASSES, "size": 10, "room": 192, "lr": 1e-2, **fields})


def shots(count: int, streams: int = 1, seed: int = 0) -> Tensor:
    """Images of very different colours, that fade to one side."""
    g = torch.Generator().manual_seed(seed)
    x = images(streams, count, seed, torch.float64)
    gain, slope = torch.randn(2, streams, count, 3, 1, 1, generator=g, dtype=torch.float64)
    return (x * (1 + gain) + slope * torch.linspace(-1, 1, 8, dtype=torch.float64)).clamp(0, 1)


def test_the_network_of_these_tests_predicts_all_classes() -> None:
    net = network()
    labels = net(shots(64), *net.source(), Frozen()).logits.argmax(-1)
    assert torch.bincount(labels[0], minlength=CLASSES).min() >= 4


def play(method: Any, net: Backbone, x: Tensor, batch: int, valid: Tensor | None = None, seed: int = 0) -> Any:
    """Play (S, T, ...) images in batches; all predictions, and the state."""
    state, outputs = method.init(net, len(x), seed), []
    for i in range(0, x.shape[1], batch):
        part = slice(i, i + batch)
        y, state = method.step(net, state, x[:, part], None if valid is None else valid[:, part])
        outputs.append(y)
    return torch.cat(outputs, 1), state


def gap(a: Any, b: Any) -> float:
    """The largest difference between two states, reports aside, which are in float32."""
    mine, other = ({k: t.double() for k, t in leaves(s).items() if not k.startswith("info.")} for s in (a, b))
    return max(float((mine[k] - other[k]).abs().max()) for k in mine)


# -- RoTTA ------------------------------------------------------------------------------------------------------------


def slow_rotta(method: Rotta, net: Backbone, x: Tensor, batch: int) -> Any:
    """One stream, one image at a time, the memory as lists: (predictions, teacher, student, times updated, memory)."""
    model = reference.TimelyMemory(method.size, CLASSES)
    teacher, student = net.source(), net.source()
    moments, seen, outputs = adam_init(student[0]), 0, []
    for start in range(0, x.shape[1], batch):
        with torch.no_grad():
            logits = net(x[:, start : start + batch], *teacher, Frozen()).logits
        outputs.append(logits)
        for i, p in enumerate(logits[0].softmax(-1)):
            model.add(start + i, int(p.argmax()), float(-(p * (p + 1e-6).log()).sum()))
            seen += 1
            if seen % method.every:
                continue
            held = model.contents()
            memory = torch.stack([x[0, position] for position, *_ in held])[None]
            age = torch.tensor([age for *_, age in held], dtype=torch.float64) / method.size
            with torch.no_grad():
                target, _, teacher_stats = net(memory, *teacher, Robust(method.alpha))
            affine = student[0].leaf()
            guess, _, student_stats = net(flipped(memory), affine, student[1], Robust(method.alpha))
            loss = -(target.softmax(-1) * guess.log_softmax(-1)).sum(-1)[0]
            loss = (loss * (-age).exp() / (1 + (-age).exp())).mean()
            grads = Affine(*torch.autograd.grad(loss, affine))
            moved, moments = adam_step(student[0], grads, moments, method.lr)
            both = zip(teacher[0], moved, strict=True)
            teacher = Affine(*((1 - method.nu) * t + method.nu * s for t, s in both)), teacher_stats
            student = moved, student_stats
    return torch.cat(outputs, 1), teacher, student, moments.steps, model


@pytest.mark.parametrize("batch", [1, 4, 7, 10, 25, 64], ids=lambda b: f"batch {b}")
def test_rotta_updates_after_every_tenth_image_wherever_in_a_batch(batch: int) -> None:
    """Catches an update at the end of the batch, one too few in a long batch, and a memory from the wrong moment."""
    net, x, method = network(), shots(64), rotta(lr=1e-2, nu=0.1)
    y, state = play(method, net, x, batch)
    wanted, teacher, student, updates, model = slow_rotta(method, net, x, batch)
    assert state.adam.steps.tolist() == updates.tolist() == [6]
    assert float((y - wanted).abs().max()) < 1e-9
    for ours, theirs in ((state.teacher, teacher), (state.student, student)):
        assert gap(ours.affine, theirs[0]) < 1e-9
        assert gap(ours.stats, theirs[1]) < 1e-9
    items = sorted((item for items in model.items for item in items), key=lambda item: item.position)
    doubt = state.memory.uncertainty[0, : len(items)].tolist()
    assert doubt == pytest.approx([item.uncertainty for item in items], abs=1e-9)


def test_rotta_plays_one_image_at_a_time_as_it_plays_batches() -> None:
    """With a teacher that stands still batches cannot matter, the random views included, which count updates."""
    net, x = network(), shots(64)
    method = rotta(alpha=0.0, nu=0.0, augment=tribe.core.augment.Augment())
    states = [play(method, net, x, batch)[1] for batch in (1, 7, 64)]
    assert int(states[0].adam.steps) == 6
    for state in states[1:]:
        assert gap(state.student, states[0].student) < 1e-9
        assert gap(state.memory, states[0].memory) < 1e-9
        assert gap(state.adam, states[0].adam) < 1e-9


@pytest.mark.parametrize("make", [partial(rotta, nu=0.1), partial(note, every=5)])
def test_streams_out_of_phase_are_each_as_if_alone(make: Any) -> None:
    """Catches an update of one stream that touches another: they reach their updates at different times."""
    net, x, method = network(), shots(40, streams=3), make()
    valid = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < torch.tensor([[1.0], [0.6], [0.3]])
    y, state = play(method, net, x, 8, valid, seed=4)
    assert len(set(state.adam.steps.tolist())) == 3
    for i in range(3):
        z, alone = play(method, net, x[i : i + 1], 8, valid[i : i + 1], seed=4 + i)
        assert float((y[i] - z[0]).abs().max()) < 1e-9
        assert gap(stream(state, i, 3), alone) < 1e-9


@pytest.mark.parametrize("make", [rotta, note])
def test_padding_anywhere_in_a_batch_changes_nothing(make: Any) -> None:
    """Catches invalid images in the memory, in ages, in draws or in the count towards an update."""
    net, x = network(), shots(60)
    valid = torch.rand(1, 60, generator=torch.Generator().manual_seed(2)) < 0.6
    method = make()
    state, without = method.init(net), method.init(net)
    for i in range(0, 60, 12):
        part = slice(i, i + 12)
        keep = valid[0, part]
        y, state = method.step(net, state, x[:, part], valid[:, part])
        z, without = method.step(net, without, x[:, part][:, keep])
        assert float((y[:, keep] - z).abs().max()) < 1e-9
    assert int(state.adam.steps) > 1
    assert gap(state, without) < 1e-9


def test_rotta_tells_how_far_the_network_it_predicts_with_has_moved() -> None:
    net, method = network(), rotta(nu=0.25)
    _, state = play(method, net, shots(40), 20)
    origin, deployed = (torch.cat(affine, 1) for affine in (net.source()[0], method.deployed(net, state).affine))
    expected = (deployed - origin).norm() / origin.norm()
    assert expected > 1e-4
    assert float(state.info.distance) == pytest.approx(float(expected), rel=1e-5)


# -- NOTE -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 12, 24])
@pytest.mark.parametrize("every", [None, 4, 5, 30])
def test_note_learns_after_every_so_many_images_from_the_memory_of_that_moment(batch: int, every: int | None) -> None:
    """Against a loop over images: at the end of a batch, or also in its middle, and several times in one."""
    net, x, method = network(), shots(24), note(every=every)
    affine, stats = net.source()
    moments, state, bank = adam_init(affine), method.init(net), method.init(net).memory
    real = torch.ones(1, 1, dtype=torch.bool)
    for i in range(0, 24, batch):
        with torch.no_grad():
            wanted = net(x[:, i : i + batch], affine, stats, norms.create("instance")).logits
        y, state = method.step(net, state, x[:, i : i + batch])
        assert float((y - wanted).abs().max()) < 1e-9
        for j in range(i, i + batch):
            label = wanted[:, j - i : j - i + 1].argmax(-1)
            bank = add_reservoir(bank, x[:, j : j + 1], label, real, state.key.seed)
            if (j + 1) % (every or batch) == 0:
                leaf = affine.leaf()
                memory = pictures(bank, (3, 8, 8))[:, : int(bank.held)]
                guess, _, stats = net(memory, leaf, stats, norms.create("instance", observing=True))
                loss = (torch.special.entr(guess.softmax(-1))).sum(-1).mean()
                affine, moments = adam_step(affine, Affine(*torch.autograd.grad(loss, leaf)), moments, method.lr)
        assert gap(state.affine, affine) < 1e-9
        assert gap(state.stats, stats) < 1e-9
        assert torch.equal(state.memory.image, bank.image)
        assert torch.equal(state.memory.label, bank.label)
    assert int(state.adam.steps) == 24 // (every or batch)


# -- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rotta, note])
def test_a_stream_whose_images_change_their_shape_goes_on(make: Any) -> None:
    """Catches a memory that reads images of one shape as another."""
    net, method = network(), make()
    _, state = play(method, net, shots(25), 5)
    small = shots(25)[..., :6]
    for i in range(0, 25, 5):
        _, state = method.step(net, state, small[:, i : i + 5])
    assert int(state.memory.arrivals) == 50
    kept = pictures(state.memory, (3, 8, 6))[0, : int(state.memory.held)]
    offered = small[0].flatten(1)
    assert all(bool((offered == image.flatten()).all(1).any()) for image in kept)


@pytest.mark.parametrize("name", ["rotta", "note"])
def test_images_without_room_are_refused_and_nothing_is_lost(name: str) -> None:
    adapter = tribe.adapt(small_network(), name, room=192)
    adapter(torch.rand(4, 3, 8, 8))
    before = adapter.digest()
    with pytest.raises(ValueError, match=r"\(3, 9, 9\) have 243 values each; the memory has room for 192.*room=243"):
        adapter(torch.rand(4, 3, 9, 9))
    assert adapter.digest() == before
    adapter(torch.rand(4, 3, 8, 8))


def test_an_augmentation_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="augment is an Augment or a callable"):
        rotta(augment=3)
    with pytest.raises(ValueError, match=r"augment turned images of shape \(10, 3, 8, 8\) into \(10, 3, 8, 4\)"):
        play(rotta(augment=lambda x: x[..., :4]), network(), shots(10), 10)
