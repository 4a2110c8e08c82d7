"""Many streams by name on one frozen network: `tribe.fleet`. Only streams that have images are stepped."""

from tribe.fleet.fleet import Fleet, UnknownStream, fleet, stream_seed

__all__ = ["Fleet", "UnknownStream", "fleet", "stream_seed"]
