"""Versions of the small network for tests: trained anew (other weights), and tuned (nearly the same weights)."""

import torch

import tribe
from tribe.serve.versions import Versions
from tribe.testing import small_network


def tuned_network(change=0.02):
    """The small network with weights that differ by a small part."""
    net = small_network()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1 + change)
    return net


NETWORKS = {"1": small_network, "2": lambda: small_network(seed=1), "3": tuned_network}


def fleet_of(version, **options):
    """The fleet of a version, bit for bit the same each time."""
    return tribe.fleet(NETWORKS[version](), **{"h0": 2.0, "exact": True, **options})


def versions_of(*names, **options):
    """Versions side by side, the default one first; without names all three."""
    return Versions({name: fleet_of(name, **options) for name in names or NETWORKS})
