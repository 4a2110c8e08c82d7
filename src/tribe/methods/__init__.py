"""Methods: how a classifier adapts while it predicts. Each is one file, a frozen dataclass of hyper-parameters.

To add one, put a file beside this one, with `@register("name")`. See CONTRIBUTING.
"""

from tribe.methods.base import Method, register, registry

create, names, get = registry.create, registry.names, registry.get
registry.load(__name__, __path__)

__all__ = ["Method", "create", "get", "names", "register", "registry"]
