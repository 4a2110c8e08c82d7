"""The state files of single streams: what a fleet saves, and what it takes."""

from os import PathLike
from typing import Any

from tribe.core.backbone import Backbone
from tribe.core.state import leaves, rebuild
from tribe.health.snapshots import copy_like
from tribe.io import states
from tribe.io.states import Saved, StateFileError
from tribe.methods import AnyMethod, get_fields
from tribe.methods.encoding import method_for_file, method_from_file
from tribe.streams.pool import Entry


class StateFiles:
    """Turns streams of one method on one network into state files and back.

    Args:
        method: what adapts.
        net: the network.
        like: a state of one stream.
    """

    def __init__(self, method: AnyMethod, net: Backbone, like: Any) -> None:
        self.method, self.net, self.like = method, net, like
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        """That of the network, computed once: its weights do not change."""
        if self._fingerprint is None:
            self._fingerprint = self.net.fingerprint()
        return self._fingerprint

    def saved(self, entry: Entry) -> Saved:
        """What a file of this stream holds."""
        fields = method_for_file(self.method)
        return Saved(self.method.name, fields, 1, entry.frozen, self.fingerprint, leaves(entry.state))

    def state(self, source: str | PathLike[str], saved: Saved) -> Any:
        """A copy of the state in a file, if it is one of a single stream of this method on this network."""
        if saved.streams != 1:
            raise StateFileError(f"{source} holds {saved.streams} streams; a stream of a fleet is loaded from one")
        found: str | AnyMethod = saved.method
        if saved.method == self.method.name:
            mine = get_fields(self.method)
            own = {name: mine.get(name) for name, v in saved.fields.items() if _is_given(v)}
            found = method_from_file(source, saved.method, saved.fields, own)
        if found != self.method:
            raise StateFileError(f"{source} was saved with {found}; this fleet runs {self.method}")
        if saved.fingerprint != self.fingerprint:
            states.check_fingerprint(source, saved.fingerprint, self.net)
        like = leaves(self.like)
        states.check_tensors(source, saved.tensors, like)
        return copy_like(rebuild(self.like, saved.tensors), self.like)

    def check(self, state: Any) -> None:
        """Refuse a state that is not one of a single stream of this method, or that is not finite."""
        named = leaves(state) if isinstance(state, type(self.like)) else {}
        like = leaves(self.like)
        wrong = [
            n for n in like if n not in named or (named[n].shape, named[n].dtype) != (like[n].shape, like[n].dtype)
        ]
        if wrong or len(named) != len(like):
            raise ValueError(
                f"the state is not one of a single stream of {self.method.name}: {', '.join(wrong[:4])} missing or of "
                "another shape or type. Give what state() returned"
            )
        if names := states.not_finite(named):
            raise ValueError(f"the state is not finite ({', '.join(names[:4])}), so it can predict nothing")


def _is_given(value: Any) -> bool:
    """Whether a file does not hold a field: the fleet's own is used, and the digest of source knowledge compared."""
    return isinstance(value, dict) and ("callable" in value or "knowledge" in value)


def decode_bytes(name: str, data: bytes) -> tuple[str, Saved]:
    """What the bytes of a stream's state file hold, and what messages call them."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"expected the bytes of a state file; got {type(data).__name__}")
    source = f"the state for stream {name!r}"
    return source, states.decode(bytes(data), source)
