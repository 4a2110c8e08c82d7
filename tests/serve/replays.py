"""A fleet on a small network, and the replay of what a stream learned: what the worker's streams are compared with."""

import tribe
from tribe.core.state import digest
from tribe.streams.fleet import stream_seed
from tribe.testing import images, small_network


def new_fleet(**options):
    return tribe.fleet(small_network(), h0=2.0, exact=True, **options)


def batch(seed, size=2):
    return images(1, size, seed)[0]


def replay(fleet, stream, batches):
    """The digest of a stream that learned from these batches, one by one, through `Method.step` alone."""
    state = fleet.method.init(fleet.net, 1, stream_seed(stream, fleet.seed))
    for x in batches:
        _, state = fleet.method.step(fleet.net, state, x[None])
    return digest(state)
