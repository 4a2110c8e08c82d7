"""The contract of methods, norm rules, time filters, scenarios and data sets; public, for custom components too.

    from tribe.testing import check_method
    check_method(MyMethod(classes=4))       # raises AssertionError naming the property that does not hold

The checks feed a method a dozen images. A method that learns only every n images, or keeps n images in a memory, needs
smaller values for these fields and declares them, ``small = {"every": 4, "size": 8}``. The checks use them where the
method's own values are larger: see `small`. `a_few_images_are_enough` catches a method that does not declare them.

Each check is named for the property it asserts; its docstring names the bug it catches. The repository's tests run the
checks over all registries, and over mutants: components with one bug each, which a check must find.
"""

from collections.abc import Callable
from typing import Any

from tribe.data.datasets import Dataset
from tribe.data.scenarios import Scenario
from tribe.filters import TimeFilter
from tribe.methods import AnyMethod
from tribe.norms import Norm
from tribe.testing.dataset_checks import DATASET_CHECKS
from tribe.testing.filter_checks import FILTER_CHECKS
from tribe.testing.method_checks import METHOD_CHECKS
from tribe.testing.norm_checks import NORM_CHECKS
from tribe.testing.scenario_checks import SCENARIO_CHECKS
from tribe.testing.shared import (
    CLASSES,
    SIZE,
    images,
    informed,
    label_sets,
    labels_in_bursts,
    predictions,
    ready,
    small,
    small_network,
)


def check_method(method: AnyMethod) -> None:
    """Check a method (built with classes=4); AssertionError says which property does not hold."""
    _run(METHOD_CHECKS, small(method))


def check_norm(norm: Norm) -> None:
    """Check a norm rule."""
    _run(NORM_CHECKS, norm)


def check_filter(filter: TimeFilter) -> None:
    """Check a time filter."""
    _run(FILTER_CHECKS, filter)


def check_scenario(scenario: Scenario) -> None:
    """Check a scenario."""
    _run(SCENARIO_CHECKS, scenario)


def check_dataset(dataset: Dataset) -> None:
    """Check a data set; it reads a few images of every domain."""
    _run(DATASET_CHECKS, dataset)


def _run(checks: tuple[Callable[[Any], None], ...], component: Any) -> None:
    for check in checks:
        try:
            check(component)
        except AssertionError as error:
            raise AssertionError(f"{component!r} fails {check.__name__}: {error}") from error


__all__ = [
    "CLASSES",
    "DATASET_CHECKS",
    "FILTER_CHECKS",
    "METHOD_CHECKS",
    "NORM_CHECKS",
    "SCENARIO_CHECKS",
    "SIZE",
    "check_dataset",
    "check_filter",
    "check_method",
    "check_norm",
    "check_scenario",
    "images",
    "informed",
    "label_sets",
    "labels_in_bursts",
    "predictions",
    "ready",
    "small",
    "small_network",
]
