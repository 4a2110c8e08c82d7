"""Methods: how a classifier adapts while it predicts. Each is one file, a frozen dataclass of hyper-parameters.

To add one, put a file beside this one, with `@register("name")`; it imports what it needs from here. See CONTRIBUTING.
"""

from typing import Any

from tribe.engine import all_weights, losses, memory, optim
from tribe.engine.all_weights import Parameters, WeightLayout
from tribe.engine.augment import Augment, View, view
from tribe.engine.backbone import Backbone, Output
from tribe.engine.memory import ROOM, Reservoir, Timely
from tribe.engine.moments import wide
from tribe.engine.rng import Key
from tribe.engine.rules import Frozen, PerBatch
from tribe.engine.segments import segment
from tribe.engine.state import Affine, Info, Stats, clone, select, tree_map
from tribe.knowledge import (
    Knowledge,
    KnowledgeError,
    KnowledgeLike,
    checked_tensors,
    require_labels,
    study_batches,
)
from tribe.methods.method import (
    Deployed,
    Method,
    check_classes,
    check_fits,
    features_of,
    register,
    registry,
    require_features,
)
from tribe.methods.stepping import finish, finite, quiet, screen
from tribe.norms import Norm
from tribe.norms.balanced import Balanced
from tribe.norms.instance import Instance
from tribe.norms.robust import Robust
from tribe.registry import nearest

names = registry.names


def variants() -> list[str]:
    """The named settings of all methods, such as "selftrain/fixmatch"."""
    return [f"{name}/{variant}" for name in names() for variant in registry.get(name).variants]


def get(name: str) -> type[Method]:
    """The class of a method or of a variant."""
    return registry.get(name.partition("/")[0])


def create(name: str, **fields: Any) -> Method:
    """Build a method from the name of a method or a variant, and its fields.

    >>> create("selftrain/robust-bn", classes=10).learning
    False
    """
    base, slash, variant = name.partition("/")
    known = get(base).variants
    if slash and variant not in known:
        raise ValueError(f"{base} has no variant {variant!r}: {nearest(variant, known)}")
    return registry.create(base, **{**known.get(variant, {}), **fields})


__all__ = [
    "ROOM",
    "Affine",
    "Augment",
    "Backbone",
    "Balanced",
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
    "Parameters",
    "PerBatch",
    "Reservoir",
    "Robust",
    "Stats",
    "Timely",
    "View",
    "WeightLayout",
    "all_weights",
    "check_classes",
    "check_fits",
    "checked_tensors",
    "clone",
    "create",
    "features_of",
    "finish",
    "finite",
    "get",
    "losses",
    "memory",
    "names",
    "optim",
    "quiet",
    "register",
    "registry",
    "require_features",
    "require_labels",
    "screen",
    "segment",
    "select",
    "study_batches",
    "tree_map",
    "variants",
    "view",
    "wide",
]

registry.load(__name__, __path__)  # last: method files import the names above from here
