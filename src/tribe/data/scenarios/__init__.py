"""Scenarios ("protocols"): the order of a stream. A scenario makes a schedule, plain data, from labels alone.

    scenario = tribe.scenarios.create("gli-f", imbalance=100, domains=("fog@5", "snow@5"))
    schedule = scenario.schedule([fog_labels, snow_labels], seed=425)
    schedule.domain, schedule.index                # sample t is image index[t] of scenario.domain_names[domain[t]]

To add one, put a file beside this one with a subclass of `Scenario`; see CONTRIBUTING.
"""

from tribe.core.state import digest
from tribe.data.scenarios.protocols import RealWorld
from tribe.data.scenarios.sampling import Dirichlet, LongTail, Natural, Shuffled
from tribe.data.scenarios.scenario import CIFAR_C, IMAGENET_C, MNIST_C, Scenario, register, registry
from tribe.data.scenarios.schedules import Schedule, class_counts, local_balance, played_labels, save

create, names, get = registry.create, registry.names, registry.get
registry.load(__name__, __path__)

__all__ = [
    "CIFAR_C",
    "IMAGENET_C",
    "MNIST_C",
    "Dirichlet",
    "LongTail",
    "Natural",
    "RealWorld",
    "Scenario",
    "Schedule",
    "Shuffled",
    "class_counts",
    "create",
    "digest",
    "get",
    "local_balance",
    "names",
    "played_labels",
    "register",
    "registry",
    "save",
]
