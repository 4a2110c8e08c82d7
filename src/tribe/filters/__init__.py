"""Time filters: use the order of images, whose neighbours often share a class. Each is one file, a frozen dataclass.

The next image of a camera is probably of the same class. A filter turns the predictions of any method into predictions
that use this: ``tribe.adapt(net, "tribe", time="auto")``. To add one, put a file beside this one, with
`@register("name")`; it imports what it needs from here. See docs/time.md.
"""

from tribe.filters.filter import Filtered, FilterInfo, TimeFilter, bounded, informative, register, registry

create, names, get = registry.create, registry.names, registry.get


def resolve(given: str | TimeFilter) -> TimeFilter:
    """Return a filter as it is; a name stands for the filter with default settings, "auto" for the Markov filter."""
    if isinstance(given, TimeFilter):
        return given
    return create("time" if given == "auto" else given)


__all__ = [
    "FilterInfo",
    "Filtered",
    "TimeFilter",
    "bounded",
    "create",
    "get",
    "informative",
    "names",
    "register",
    "registry",
    "resolve",
]

registry.load(__name__, __path__)  # last: filter files import the names above from here
