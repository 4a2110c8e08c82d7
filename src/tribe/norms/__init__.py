"""Norm rules: what a normalisation layer does with the moments of a batch. A rule, not a layer; configuration only.

To add one, put a file beside this one: a frozen dataclass with `@register("name")`. See CONTRIBUTING.
"""

from tribe.engine.rules import Norm
from tribe.registry import Registry

registry: Registry[Norm] = Registry("norm")
register, create, names, get = registry.register, registry.create, registry.names, registry.get
registry.load(__name__, __path__)

__all__ = ["Norm", "create", "get", "names", "register", "registry"]
