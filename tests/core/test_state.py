"""States as named tuples of tensors: what selects streams in few launches equals what selects tensor by tensor."""

import pytest
import torch

from tribe.core import state as states
from tribe.core.state import clone, leaves, select, select_joined
from tribe.testing import ready
from tribe.testing.shared import small_backbone


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("largest", [2**20, 8])
def test_tensors_that_are_joined_are_selected_as_if_alone(monkeypatch, chosen, largest):
    monkeypatch.setattr(states, "JOINED", largest)
    net, method = small_backbone(), ready("tribe")
    old = method.init(net)
    _, new = method.step(net, old, torch.rand(1, 6, 3, 8, 8))
    new = new._replace(key=new.key._replace(seed=old.key.seed))  # the same tensor in both
    mask = torch.tensor([chosen])
    picked = states._select_joined(mask, new, old)
    wanted = new if chosen else old
    for (name, t), other in zip(leaves(picked).items(), leaves(wanted).values(), strict=True):
        assert t.dtype == other.dtype, name
        assert torch.equal(t, other), name
    assert picked.key.seed is old.key.seed
    assert type(picked) is type(old)


def test_on_a_cpu_nothing_is_joined():
    net, method = small_backbone(), ready("tribe")
    old = method.init(net, 2)
    new = clone(old)
    mask = torch.tensor([True, False])
    for a, b in zip(
        leaves(select_joined(mask, new, old)).values(), leaves(select(mask, new, old)).values(), strict=True
    ):
        assert torch.equal(a, b)
    assert select_joined(mask | True, new, old) is new
