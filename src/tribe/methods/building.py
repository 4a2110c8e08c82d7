"""A method for a network, from what a person names: for everything that adapts a network."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tribe.core.backbone import Backbone
from tribe.core.validation import check_source, warn_of_layers_left_alone
from tribe.filters import TimeFilter, resolve
from tribe.methods import AnyMethod, Method, Pipeline, check_fits, count_classes, create, get, parse, with_fields


def backbone_for(model: nn.Module | Backbone, method: str | AnyMethod, alone: bool = True) -> Backbone:
    """Return the network of a method; its output may be anything if the method ignores it and is in no pipeline."""
    if isinstance(model, Backbone):
        return model
    known = get(method) if isinstance(method, str) else method
    alone = alone and not (isinstance(method, str) and parse(method).suffix)
    return Backbone(model, dense=alone and known.dense)


def build_method(
    net: Backbone,
    method: str | AnyMethod,
    time: str | TimeFilter | None,
    classes: int | None,
    fields: Mapping[str, Any],
    guard: Any = None,
) -> AnyMethod:
    """Build a method by its name and fields, in a pipeline with a guard and a time filter if they are given.

    A method that is already built is used as it is. If it does not know the number of classes, it takes ``classes``.
    """
    if isinstance(method, Method | Pipeline):
        if fields:
            raise TypeError(
                f"the method is built already: tribe.methods.create({method.name!r}, ...) sets {', '.join(fields)}"
            )
        counted = method.classes is None and classes is not None
        built = with_fields(method, classes=_count(net, classes)) if counted else method
    else:
        get(method)  # report an unknown name before anything else
        built = create(method, classes=_count(net, classes), **fields)
    if guard is None and time is None:
        return built
    whole = Pipeline.of(built)
    if guard is not None and whole.guard is not None:
        raise ValueError(f"{whole.name} has a guard, or is watched, already")
    if time is not None and whole.filter is not None:
        raise ValueError(f"{whole.name} has a time filter already")
    return Pipeline(
        whole.method,
        whole.guard if guard is None else guard,
        whole.filter if time is None else resolve(time),
    )


def _count(net: Backbone, classes: int | None) -> int | None:
    """Return the number of classes; None if it is not known and the network may return something else than logits."""
    if net.dense and (classes is not None or (net.classes or 0) < 2):
        return classes
    return count_classes(net, classes)


def check_network(net: Backbone, method: AnyMethod, classes: int | None = None) -> int | None:
    """Refuse a network that the method cannot adapt; otherwise the number of classes, if it is known."""
    found = _count(net, classes if classes is not None else method.classes)
    if method.classes is not None and method.classes != found:
        raise ValueError(f"the method was built for {method.classes} classes; the network has {found}")
    check_fits(net, method)
    check_source(net)
    warn_of_layers_left_alone(net)
    return found
