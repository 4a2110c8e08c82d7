"""A fleet gives every stream what it gets alone: with exact=True bit for bit, else to rounding."""

import pytest
import torch

import tribe
from tribe import methods
from tribe.core.state import digest
from tribe.streams import stream_seed
from tribe.streams.core import EXACT, OWN_WEIGHTS
from tribe.testing import images, ready
from tribe.testing.samples import small, small_backbone

# Rounds of images by stream: odd numbers, streams that come late, and one that comes alone.
ROUNDS = (
    {"a": 1, "b": 1, "c": 3},
    {"a": 1, "c": 3, "d": 2, "e": 1},
    {"b": 4},
    {"a": 2, "b": 2, "c": 1, "d": 1, "e": 5, "f": 1},
)


def play():
    """The images of each round."""
    for i, sizes in enumerate(ROUNDS):
        yield {name: images(1, n, 100 * i + j)[0] for j, (name, n) in enumerate(sizes.items())}


def replay(method, net, name, rounds):
    """The predictions and the last state of one stream through the method's steps."""
    state, answers = method.init(net, 1, stream_seed(name)), []
    for batch in rounds:
        if name in batch:
            logits, state = method.step(net, state, batch[name].unsqueeze(0))
            answers.append(logits[0])
    return answers, state


@pytest.mark.parametrize("name", [*methods.names(), "tribe+time", "tribe+guard", "cotta+time", "lame+time"])
def test_every_stream_gets_the_bits_that_it_gets_alone(name):
    net, rounds = small_backbone(), list(play())
    method = small(ready(name))
    fleet = tribe.fleet(net, method, exact=True)
    answers = [fleet(batch) for batch in rounds]
    assert fleet.unbatched_reason == (OWN_WEIGHTS if name.startswith(("cotta", "petal", "ttac")) else EXACT)
    assert fleet.names == ["a", "b", "c", "d", "e", "f"]
    for stream in fleet.names:
        expected, state = replay(method, net, stream, rounds)
        given = [batch[stream] for batch in answers if stream in batch]
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
        assert fleet.digest(stream) == digest(state)
        assert fleet.clock(stream) == len(expected)
