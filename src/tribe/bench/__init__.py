"""What adapting costs, measured side by side in one process; ``tribe bench`` is the command.

    from tribe import bench

    net = bench.build("resnet20")  # or any classifier
    result = bench.measure(net, bench.Setting("resnet20", (3, 32, 32), classes=10))
    print(bench.show(result))

Contenders take turns, so that a noisy machine hurts all alike, and what counts are ratios: to plain inference of the
same network, and to the matrix products that the device does meanwhile.
"""

from tribe.bench.contenders import Contender, Ground, check, contender
from tribe.bench.contest import METHODS, REPEATS, Result, Row, Setting, measure
from tribe.bench.networks import build
from tribe.bench.results import Change, check_comparable, compare, read, surroundings, to_data, write
from tribe.bench.text import show, show_changes

__all__ = [
    "METHODS",
    "REPEATS",
    "Change",
    "Contender",
    "Ground",
    "Result",
    "Row",
    "Setting",
    "build",
    "check",
    "check_comparable",
    "compare",
    "contender",
    "measure",
    "read",
    "show",
    "show_changes",
    "surroundings",
    "to_data",
    "write",
]
