"""Overrides of fields: ``--set COMPONENT.FIELD=VALUE``."""

import ast
from collections.abc import Sequence
from typing import Any

from tribe.registry import nearest

Overrides = dict[str, dict[str, Any]]  # component -> field -> value


def parse_overrides(texts: Sequence[str] | None, components: Sequence[str]) -> Overrides:
    """The fields of each component. A value is a Python literal; what is not a literal is a string.

    >>> parse_overrides(["scenario.sigma=0.01", "tent.optimizer=sgd"], ["scenario", "tent", "bn"])
    {'scenario': {'sigma': 0.01}, 'tent': {'optimizer': 'sgd'}, 'bn': {}}
    """
    overrides: Overrides = {component: {} for component in components}
    for text in texts or ():
        place, equals, value = text.partition("=")
        component, dot, field = place.partition(".")
        if not (equals and dot and field):
            raise ValueError(f"--set takes COMPONENT.FIELD=VALUE, such as scenario.sigma=0.01; got {text!r}")
        if component not in overrides:
            raise ValueError(f"--set {text}: {component!r} takes no part in this run: {nearest(component, overrides)}")
        try:
            overrides[component][field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            overrides[component][field] = value
    return overrides
