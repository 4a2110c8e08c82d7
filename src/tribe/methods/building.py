"""A method for a network, from what a person names: for everything that adapts a network."""

from collections.abc import Mapping
from typing import Any

from tribe.engine.backbone import Backbone
from tribe.engine.checks import check_source
from tribe.methods import Method, check_fits, count_classes, create, get, with_filter
from tribe.time import TimeFilter, resolve


def build_method(
    net: Backbone,
    method: str | Method,
    time: str | TimeFilter | None,
    classes: int | None,
    fields: Mapping[str, Any],
) -> Method:
    """Build a method by its name and fields, with a time filter if one is named; a method that is built stays."""
    if isinstance(method, Method):
        if fields:
            raise TypeError(
                f"the method is built already: tribe.methods.create({method.name!r}, ...) sets {', '.join(fields)}"
            )
        built = method
    else:
        get(method)  # report an unknown name before anything else
        built = create(method, classes=count_classes(net, classes), **fields)
    return built if time is None else with_filter(built, resolve(time))


def check_network(net: Backbone, method: Method, classes: int | None = None) -> int:
    """Refuse a network that the method cannot adapt; otherwise the number of classes."""
    found = count_classes(net, classes if classes is not None else method.classes)
    if method.classes is not None and method.classes != found:
        raise ValueError(f"the method was built for {method.classes} classes; the network has {found}")
    check_fits(net, method)
    check_source(net)
    return found
