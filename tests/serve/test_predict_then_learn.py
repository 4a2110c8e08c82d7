"""A request that is predicted now and learned later gets the answer of a step: methods predict with the state from
before the batch. So the latency budget changes when a stream learns, not what it answers or what it learns.

It holds, bit for bit, for every registered method, alone and with a time filter. A stream whose learning queue is not
empty predicts with a state that has not learned what is in the queue: its answers are those of that state.
"""

import pytest
import torch

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import digest
from tribe.testing import images, ready, small, small_network

NAMES = [*methods.names(), "tribe+time", "lame+time"]


@pytest.mark.parametrize("name", NAMES)
def test_predict_then_learn_equals_a_step(name):
    net, method = Backbone(small_network()), small(ready(name))
    state = method.init(net, 1, 3)
    for seed in range(3):
        x = images(1, 6, seed)
        before = digest(state)
        predicted = method.predict(net, state, x)
        assert digest(state) == before
        stepped, state = method.step(net, state, x)
        assert torch.equal(predicted, stepped)
