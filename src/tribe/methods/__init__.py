"""Methods: how a classifier adapts while it predicts. Each is one file, a frozen dataclass of hyper-parameters.

To add one, put a file beside this one, with `@register("name")`; it imports what it needs from here. See CONTRIBUTING.
"""

from typing import Any

from tribe.core import all_weights, losses, memory, optim
from tribe.core.all_weights import Parameters, WeightLayout
from tribe.core.augment import Augment, View, view
from tribe.core.backbone import Backbone, Output
from tribe.core.memory import ROOM, Reservoir, Timely
from tribe.core.moments import accumulation_dtype
from tribe.core.packed import PackedStats
from tribe.core.rng import Key
from tribe.core.rules import Frozen, PerBatch
from tribe.core.segments import segment
from tribe.core.state import Affine, Info, Stats, clone, rows_of, select, tree_map
from tribe.filters import registry as time_filters
from tribe.knowledge import (
    Knowledge,
    KnowledgeError,
    KnowledgeLike,
    checked_tensors,
    require_labels,
    study_batches,
)
from tribe.methods.composed import Composed, ComposedState, Wrapper, compose, wrappers
from tribe.methods.method import (
    Deployed,
    Method,
    check_classes,
    check_fits,
    count_classes,
    features_of,
    register,
    registry,
    require_features,
)
from tribe.methods.stepping import Agreement, commit_step, distance_of, finite, gradient_step, mask_logits, screen
from tribe.methods.timed import Timed, timed, with_filter
from tribe.norms import Norm
from tribe.norms.balanced import Balanced
from tribe.norms.instance import Instance
from tribe.norms.named import from_text as norm_from_text
from tribe.norms.robust import Robust
from tribe.registry import build, nearest

names = registry.names


def variants() -> list[str]:
    """The named settings of all methods, such as "selftrain/fixmatch"."""
    return [f"{name}/{variant}" for name in names() for variant in registry.get(name).variants]


def strip_filter(name: str) -> str:
    """The name of a method or a variant without its time filter.

    >>> strip_filter("selftrain/robust-bn+time"), strip_filter("selftrain/bn+st")
    ('selftrain/robust-bn', 'selftrain/bn+st')
    """
    method, _, rule = name.rpartition("+")
    return method if rule in time_filters.names() else name


def strip_wrappers(name: str) -> str:
    """The name of a method or a variant without anything around it.

    >>> strip_wrappers("selftrain/robust-bn+guard+time"), strip_wrappers("selftrain/bn+st")
    ('selftrain/robust-bn', 'selftrain/bn+st')
    """
    name = strip_filter(name)
    while (parts := name.rpartition("+"))[2] in wrappers:
        name = parts[0]
    return name


def get(name: str) -> type[Method]:
    """The class of a method or of a variant, with what is around it.

    >>> get("tribe+time").not_exportable_because
    'filters its predictions over time'
    """
    method = strip_wrappers(name)
    first, plus, rest = method.partition("/")[0].partition("+")
    if plus and first in names():  # tribe+tiem
        _refuse_order(name, rest)
    cls = registry.get(method.partition("/")[0])
    for part in name.removeprefix(method).split("+")[1:]:
        if part in wrappers:
            if issubclass(cls, wrappers[part].base):
                raise ValueError(f"{cls.name} has a guard, or is watched, already: {name!r} names two")
            cls = compose(wrappers[part].base, cls, wrappers[part].part)  # type: ignore[arg-type]  # a class is hashable
        else:
            cls = timed(cls, time_filters.get(part))
    return cls


def _refuse_order(name: str, rest: str) -> None:
    """Say what is wrong with the part of a name after the first plus."""
    known = {*time_filters.names(), *wrappers}
    for part in rest.split("+"):
        if part not in known:
            raise ValueError(f"unknown guard or time filter {part!r}: {nearest(part, known)}")
    raise ValueError(f"a time filter comes last: {name!r} has something after it, or two filters")


def create(name: str, **fields: Any) -> Method:
    """Build a method from the name of a method or a variant, with a time filter or without, and its fields.

    >>> create("selftrain/robust-bn", classes=10).learning
    False
    >>> create("source+time", within="batch").within
    'batch'
    """
    cls = get(name)
    first, slash, variant = strip_wrappers(name).partition("/")
    if slash and variant not in cls.variants:
        raise ValueError(f"{first} has no variant {variant!r}: {nearest(variant, cls.variants)}")
    return build(cls, registry.kind, {**cls.variants.get(variant, {}), **fields})


__all__ = [
    "ROOM",
    "Affine",
    "Agreement",
    "Augment",
    "Backbone",
    "Balanced",
    "Composed",
    "ComposedState",
    "Deployed",
    "Frozen",
    "Info",
    "Instance",
    "Key",
    "Knowledge",
    "KnowledgeError",
    "KnowledgeLike",
    "Method",
    "Norm",
    "Output",
    "PackedStats",
    "Parameters",
    "PerBatch",
    "Reservoir",
    "Robust",
    "Stats",
    "Timed",
    "Timely",
    "View",
    "WeightLayout",
    "Wrapper",
    "accumulation_dtype",
    "all_weights",
    "check_classes",
    "check_fits",
    "checked_tensors",
    "clone",
    "commit_step",
    "compose",
    "count_classes",
    "create",
    "distance_of",
    "features_of",
    "finite",
    "get",
    "gradient_step",
    "losses",
    "mask_logits",
    "memory",
    "names",
    "norm_from_text",
    "optim",
    "register",
    "registry",
    "require_features",
    "require_labels",
    "rows_of",
    "screen",
    "segment",
    "select",
    "strip_filter",
    "strip_wrappers",
    "study_batches",
    "timed",
    "tree_map",
    "variants",
    "view",
    "with_filter",
    "wrappers",
]

registry.load(__name__, __path__)  # last: method files import the names above from here
