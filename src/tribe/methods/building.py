"""A method for a network, from what a person names: for everything that adapts a network."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from tribe.core.backbone import Backbone
from tribe.core.checks import check_source, warn_of_layers_left_alone
from tribe.filters import TimeFilter, resolve
from tribe.methods import Method, Timed, check_fits, count_classes, create, get, with_filter, wrappers


def backbone_for(model: nn.Module | Backbone, method: str | Method, alone: bool = True) -> Backbone:
    """The network of a method; its output may be anything, if the method stands alone and never looks at it."""
    if isinstance(model, Backbone):
        return model
    known = get(method) if isinstance(method, str) else method
    return Backbone(model, dense=alone and known.dense)


def build_method(
    net: Backbone,
    method: str | Method,
    time: str | TimeFilter | None,
    classes: int | None,
    fields: Mapping[str, Any],
    guard: Any = None,
) -> Method:
    """Build a method by its name and fields, with a guard and a time filter if asked.

    A method that is already built is used as it is. If it does not know the number of classes, it takes ``classes``.
    """
    if isinstance(method, Method):
        if fields:
            raise TypeError(
                f"the method is built already: tribe.methods.create({method.name!r}, ...) sets {', '.join(fields)}"
            )
        counted = method.classes is None and classes is not None
        built = replace(method, classes=_count(net, classes)) if counted else method
    else:
        get(method)  # report an unknown name before anything else
        built = create(method, classes=_count(net, classes), **fields)
    built = built if guard is None else with_guard(built, guard)
    return built if time is None else with_filter(built, resolve(time))


def with_guard(method: Method, part: Any) -> Method:
    """A method that is built already, under a guard or watched: ``part`` holds the settings."""
    base, _ = wrappers[part.name]
    if isinstance(method, Timed):
        raise ValueError(f"a guard stands between the method and its time filter: give {method.inner.name!r} and time=")
    if isinstance(method, base):
        raise ValueError(f"{method.name} has a guard, or is watched, already")
    return base.around(method, part)


def _count(net: Backbone, classes: int | None) -> int | None:
    """The number of classes; None if it is not known and the network may return something else than logits."""
    if net.dense and (classes is not None or (net.classes or 0) < 2):
        return classes
    return count_classes(net, classes)


def check_network(net: Backbone, method: Method, classes: int | None = None) -> int | None:
    """Refuse a network that the method cannot adapt; otherwise the number of classes, if it is known."""
    found = _count(net, classes if classes is not None else method.classes)
    if method.classes is not None and method.classes != found:
        raise ValueError(f"the method was built for {method.classes} classes; the network has {found}")
    check_fits(net, method)
    check_source(net)
    warn_of_layers_left_alone(net)
    return found
