"""The network of a state as an ordinary module, where there is one."""

from typing import Any

from torch import nn

from tribe.core.backbone import Backbone
from tribe.core.rules import Frozen, PerBatch
from tribe.methods.pipeline import AnyMethod

NOT_EXPORTED = (
    "{0} cannot be exported as an ordinary module that predicts what it predicts, because {0} {1}. Keep the adapter in "
    "its place: freeze() stops it from adapting, save() and tribe.load() carry it elsewhere"
)


def plain_network(net: Backbone, method: AnyMethod, state: Any, stream: int) -> nn.Module:
    """Return a module with ordinary normalisation layers that predicts for one stream as the method does."""
    if (more := method.not_exportable_because) is not None:
        raise ValueError(NOT_EXPORTED.format(method.name, f"predicts with more than a pass of a network: {more}"))
    chosen = method.deployed(net, state).stream(stream)
    if type(chosen.norm) not in (Frozen, PerBatch):  # a subclass is another rule
        raise ValueError(NOT_EXPORTED.format(method.name, f"normalises as no ordinary layer does: {chosen.norm}"))
    frozen = chosen.stats if isinstance(chosen.norm, Frozen) else None
    return net.plain(chosen.affine, frozen, chosen.weights[0] if chosen.weights else None)
