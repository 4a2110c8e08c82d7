"""RoTTA and NOTE: streams out of phase, changed images, and what is refused; test_equations.py has their numbers."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tribe
from method_runs import darker, even_network, varied
from tribe.core.backbone import Backbone
from tribe.core.memory import images as pictures
from tribe.core.state import leaves, stream
from tribe.methods.note import Note
from tribe.methods.rotta import Rotta
from tribe.testing import CLASSES, small_network


def network() -> Backbone:
    """The contract's network with a classifier that predicts all classes, so that memories have something to decide."""
    return even_network([shots(200)])


def rotta(**fields: Any) -> Rotta:
    return Rotta(**{"classes": CLASSES, "size": 10, "every": 10, "room": 192, "augment": darker, **fields})


def note(**fields: Any) -> Note:
    return Note(**{"classes": CLASSES, "size": 10, "room": 192, "lr": 1e-2, **fields})


def shots(count: int, streams: int = 1) -> Tensor:
    """Images of very different colours."""
    return torch.cat([torch.cat(varied(1, batch=count, first=seed), 1) for seed in range(streams)])


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
