"""What a bank of speeds does besides its statistics: probes, changes of the world, places that it remembers."""

from collections import Counter

import pytest
import torch
from test_equations import assert_equals_plain_loop

import plain_methods as plain
from method_runs import DOUBLE, even_network, play, varied
from tribe import methods
from tribe.core.state import leaves

WORLDS = ((1.0, 0.0), (0.3, 0.0), (0.3, 0.7), (0.3, 0.0), (1.0, 0.0))  # gain and shift: as is, dark, bright, ...
STAY = 240  # images in each


def travel(worlds=WORLDS, stay=STAY, seed=0):
    """A stream that goes from world to world: (1, N, 3, 8, 8)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(len(worlds), stay, 3, 8, 8, generator=generator, dtype=DOUBLE)
    tint = torch.rand(len(worlds), stay, 3, 1, 1, generator=generator, dtype=DOUBLE) * 0.5 + 0.5
    gain, shift = torch.tensor(worlds, dtype=DOUBLE).unbind(1)
    return (x * tint * gain.view(-1, 1, 1, 1, 1) + shift.view(-1, 1, 1, 1, 1)).flatten(0, 1)[None]


def bank(**fields):
    return methods.create("bank", **{"classes": 4, "speeds": (0.05,), "probe": 5, **fields})


@pytest.mark.parametrize("probe", [1, 5])
def test_observed_images_of_large_batches_stand_for_the_others(probe):
    xs = [torch.cat(varied(4, first=4 * i), 1) for i in range(3)] + varied(1, batch=50, first=20)
    method = bank(speeds=(0.3, 0.02), horizon=50.0, probe=probe, observe=2)
    assert_equals_plain_loop(method, even_network(xs), xs, 1e-9)


@pytest.mark.parametrize("batch", [1, 8, 40])
@pytest.mark.parametrize("memory", [0, 1, 2])
def test_a_stream_through_several_worlds_equals_a_plain_loop(batch, memory):
    x = travel()
    xs, net, method, events = x.split(batch, 1), even_network([x]), bank(memory=memory), []
    outputs, state = play(method, net, xs)
    expected, named = plain.bank(net, [x[0] for x in xs], method, events)
    torch.testing.assert_close(torch.cat(outputs, 1)[0], torch.cat(expected), rtol=0, atol=1e-9)
    print(batch, memory, Counter(events), events)
    for name, wanted in named.items():
        torch.testing.assert_close(leaves(state)[name][0], wanted, rtol=0, atol=1e-9)
