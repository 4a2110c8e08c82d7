"""Named states that adapt on one frozen network: `tribe.adapt` and `tribe.fleet` are two views of one core."""

from tribe.streams.fleet import Fleet, fleet
from tribe.streams.names import UnknownStream, stream_seed

__all__ = ["Fleet", "UnknownStream", "fleet", "stream_seed"]
