"""Many streams by name on one frozen network: `tribe.fleet`. Only streams that have images are stepped."""

from tribe.streams.fleet import Fleet, UnknownStream, fleet, stream_seed

__all__ = ["Fleet", "UnknownStream", "fleet", "stream_seed"]
