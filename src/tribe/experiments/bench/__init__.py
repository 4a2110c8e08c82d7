"""Measure what adapting costs, side by side with plain inference; ``tribe bench`` is the command.


    net = bench.build("resnet20")  # or any classifier
    result = bench.measure(net, bench.Setting("resnet20", (3, 32, 32), classes=10))
    print(bench.show(result))

Contenders take turns, so that a noisy machine slows all of them equally. Compare the ratios: to plain inference of the
same network, and to matrix products that are timed in the same turns.
"""

from tribe.experiments.bench.contenders import Contender, Workload, build, check_names, contender
from tribe.experiments.bench.measurement import METHODS, REPEATS, BenchResult, BenchRow, Setting, measure
from tribe.experiments.bench.results import (
    Change,
    check_comparable,
    compare,
    machine_differences,
    read,
    show,
    show_changes,
    to_data,
    write,
)

__all__ = [
    "METHODS",
    "REPEATS",
    "BenchResult",
    "BenchRow",
    "Change",
    "Contender",
    "Setting",
    "Workload",
    "build",
    "check_comparable",
    "check_names",
    "compare",
    "contender",
    "machine_differences",
    "measure",
    "read",
    "show",
    "show_changes",
    "to_data",
    "write",
]
