"""State files of entries."""

from os import PathLike
from typing import Any

from tribe.core.backbone import Backbone
from tribe.core.state import copy_like, leaves, rebuild
from tribe.io import states
from tribe.io.states import Saved, StateFileError
from tribe.methods import AnyMethod, get_fields
from tribe.methods.encoding import method_for_file, method_from_file
from tribe.streams.entries import Entry


class StateFiles:
    """Turn states of one method on one network into state files and back."""

    def __init__(self, method: AnyMethod, net: Backbone) -> None:
        self.method, self.net = method, net
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the network, computed once."""
        if self._fingerprint is None:
            self._fingerprint = self.net.fingerprint()
        return self._fingerprint

    def use(self, net: Backbone) -> None:
        """Go on with this network, which may have moved."""
        self.net, self._fingerprint = net, None

    def saved(self, entry: Entry) -> Saved:
        """Return the content of the file of an entry."""
        fields, streams = method_for_file(self.method), len(entry.state.key.seed)
        return Saved(self.method.name, fields, streams, entry.frozen, self.fingerprint, leaves(entry.state))

    def state(self, source: str | PathLike[str], saved: Saved, like: Any) -> Any:
        """Return a copy of the state in a file that this method wrote.

        Raises:
            StateFileError: the file is of another method, network or number of streams, or damaged.
        """
        if saved.streams != (streams := len(like.key.seed)):
            raise StateFileError(f"{source} holds {saved.streams} streams; expected {streams}")
        found: str | AnyMethod = saved.method
        if saved.method == self.method.name:
            mine = get_fields(self.method)
            own = {name: mine.get(name) for name, value in saved.fields.items() if _is_not_saved(value)}
            found = method_from_file(source, saved.method, saved.fields, own)
        if found != self.method:
            raise StateFileError(f"{source} was saved with {found}; here {self.method} runs")
        return self.checked(source, saved, like)

    def checked(self, source: str | PathLike[str], saved: Saved, like: Any) -> Any:
        """Return a copy of the state in a file whose method is this one."""
        if saved.fingerprint != self.fingerprint:
            states.check_fingerprint(source, saved.fingerprint, self.net)
        states.check_tensors(source, saved.tensors, leaves(like))
        return copy_like(rebuild(like, saved.tensors), like)


def check_state(state: Any, like: Any, name: str) -> None:
    """Raise if this is not a finite state with the tensors of another."""
    given, expected = leaves(state) if isinstance(state, type(like)) else {}, leaves(like)
    wrong = [n for n, t in expected.items() if n not in given or (given[n].shape, given[n].dtype) != (t.shape, t.dtype)]
    if wrong or len(given) != len(expected):
        raise ValueError(
            f"the state is not one of {name}: {', '.join(wrong[:4])} missing or of another shape or type. Give what "
            "state() returned"
        )
    if names := states.not_finite(given):
        raise ValueError(f"the state is not finite ({', '.join(names[:4])}), so it can predict nothing")


def _is_not_saved(value: Any) -> bool:
    """Whether a file does not hold a field: the one here is used, and the digest of source knowledge compared."""
    return isinstance(value, dict) and ("callable" in value or "knowledge" in value)


def decode_bytes(name: str, data: bytes) -> tuple[str, Saved]:
    """Return the content of a state file in memory, and the source that messages name."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"expected the bytes of a state file; got {type(data).__name__}")
    source = f"the state for stream {name!r}"
    return source, states.decode(bytes(data), source)
