"""The plainest fleet: a state for each stream, stepped one by one with `Method.step`."""

import threading

import torch
from safetensors.torch import load, save

from tribe import methods
from tribe.engine.backbone import Backbone
from tribe.engine.state import clone, digest, leaves, rebuild
from tribe.health.snapshots import describe_streams
from tribe.testing import CLASSES, small_network


class PlainFleet:
    def __init__(self, net=None, method=None):
        self.net = net or Backbone(small_network())
        self.method = method or methods.create("tribe", classes=CLASSES, h0=2.0)
        self.states, self.frozen = {}, set()
        self._lock = threading.Lock()

    @property
    def names(self):
        return list(self.states)

    def __call__(self, images):
        logits = {}
        new = {}
        for name, x in images.items():
            run = self.method.follow if name in self.frozen else self.method.step
            answer, new[name] = run(self.net, self.states[name], x[None])
            logits[name] = answer[0]
        with self._lock:
            self.states.update(new)
        return logits

    def predict(self, images):
        states = {name: self.states[name] for name in images}
        return {name: self.method.predict(self.net, states[name], x[None])[0] for name, x in images.items()}

    def predict_source(self, x):
        source = methods.create("source", classes=self.method.classes)
        return source.predict(self.net, source.init(self.net), x[None])[0]

    def clock(self, name):
        return int(self.states[name].key.clock)

    def info(self, name):
        return describe_streams(self.states[name], None, name in self.frozen)[0]

    def add(self, name):
        if name in self.states:
            raise ValueError(f"there is a stream {name!r} already")
        self.states[name] = self.method.init(self.net)

    def drop(self, name):
        del self.states[name]
        self.frozen.discard(name)

    def reset(self, name):
        self.states[name] = self.method.init(self.net)

    def freeze(self, name):
        self.frozen.add(name)

    def unfreeze(self, name):
        self.frozen.discard(name)

    def snapshot(self, name):
        return clone(self.states[name])

    def restore(self, name, snapshot):
        self.states[name] = clone(snapshot)

    def to_bytes(self, name):
        named = {**leaves(self.states[name]), "frozen": torch.tensor(name in self.frozen)}
        return save({n: t.contiguous() for n, t in named.items()})

    def from_bytes(self, name, data):
        named = load(data)
        (self.frozen.add if named.pop("frozen") else self.frozen.discard)(name)
        self.states[name] = rebuild(self.method.init(self.net), named)

    def digest(self, name):
        return digest(self.states[name])


def replay(fleet, batches):
    """The digest of a stream that learned from these batches, one by one, through `Method.step` alone."""
    state = fleet.method.init(fleet.net)
    for x in batches:
        _, state = fleet.method.step(fleet.net, state, x[None])
    return digest(state)
