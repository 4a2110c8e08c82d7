"""Methods: how a classifier adapts while it predicts. Each is one file, a frozen dataclass of hyper-parameters.

To add one, put a file beside this one, with `@register("name")`. See CONTRIBUTING.
"""

from typing import Any

from tribe.methods.base import Method, register, registry
from tribe.registry import nearest

names = registry.names
registry.load(__name__, __path__)


def variants() -> list[str]:
    """The named settings of methods that have some: "selftrain/fixmatch"."""
    return [f"{name}/{variant}" for name in names() for variant in registry.get(name).variants]


def get(name: str) -> type[Method]:
    """The class behind the name of a method or of a variant."""
    return registry.get(name.partition("/")[0])


def create(name: str, **fields: Any) -> Method:
    """Build a method from its name, or that of a variant, and its fields.

    >>> create("selftrain/robust-bn", classes=10).learning
    False
    """
    base, slash, variant = name.partition("/")
    known = get(base).variants
    if slash and variant not in known:
        raise ValueError(f"{base} has no variant {variant!r}: {nearest(variant, known)}")
    return registry.create(base, **{**known.get(variant, {}), **fields})


__all__ = ["Method", "create", "get", "names", "register", "registry", "variants"]
