"""State files: the state of an adapter, its method's fields and a fingerprint of the source model.

A state that is not finite could never predict anything again: it is neither written nor read.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.bounds import out_of_bounds
from tribe.core.state import copy_like, leaves, per_stream, rebuild
from tribe.io import tensors as tensor_file
from tribe.io.files import write_atomically
from tribe.io.tensors import Kind, TensorFileError


class StateFileError(TensorFileError):
    """A state file that cannot be used, and why."""


class Saved(NamedTuple):
    """The content of a state file."""

    method: str  # name
    fields: dict[str, Any]  # of the method
    streams: int
    frozen: bool
    fingerprint: str  # of the network
    tensors: dict[str, Tensor]  # of the state, by name
    shadow: list[bool]  # which streams are in shadow; empty: none

    @property
    def modes(self) -> tuple[bool, ...]:
        """Return a mark for each stream: whether it is in shadow."""
        return tuple(self.shadow) or (False,) * self.streams


STATE = Kind(
    "tribe-state",
    1,
    {"method": str, "fields": dict, "streams": int, "frozen": bool, "fingerprint": str, "shadow": [bool]},
    noun="tribe state file",
    advice="Use a file that Adapter.save wrote, or start anew with tribe.adapt",
    error=StateFileError,
    defaults={"shadow": []},
)


def write(path: str | PathLike[str], saved: Saved) -> None:
    """Write a state file; the errors are those of `encode`."""
    write_atomically(path, encode(saved, path))


def encode(saved: Saved, path: str | PathLike[str] = "bytes") -> bytes:
    """Return the bytes of a state file; refuse a state that is not finite. ``path`` is where they go, for messages."""
    if names := not_finite(saved.tensors):
        rows = [per_stream(saved.tensors[name], saved.streams).isfinite().flatten(1).all(1) for name in names]
        which = ", ".join(str(i) for i in range(saved.streams) if not all(row[i] for row in rows))
        raise StateFileError(
            f"the state of stream {which} is not finite ({', '.join(names[:4])}), so it can predict nothing any more: "
            f"reset(stream=...) starts it anew, restore(snapshot) goes back. Nothing was written to {path}"
        )
    header = saved._asdict()
    return tensor_file.encode(STATE, header, header.pop("tensors"))


def read(path: str | PathLike[str]) -> Saved:
    """Read a state file; a `StateFileError` says why it cannot be read."""
    return _checked(path, *tensor_file.read(path, STATE))


def decode(data: bytes, name: str = "bytes") -> Saved:
    """Read the bytes of a state file; ``name`` is what messages call them."""
    return _checked(name, *tensor_file.decode(data, STATE, name))


def _checked(path: str | PathLike[str], header: dict[str, Any], tensors: dict[str, Tensor]) -> Saved:
    saved = Saved(**header, tensors=tensors)
    if len(saved.shadow) not in (0, saved.streams):
        raise StateFileError(
            f"{path} is damaged: it says of {len(saved.shadow)} streams whether they are in shadow; expected "
            f"{saved.streams}. {STATE.advice}"
        )
    # The file's own tensors must agree with its header before a state of that many streams is allocated.
    seeds = next((t for name, t in tensors.items() if name.split(".")[-2:] == ["key", "seed"]), None)
    if seeds is None or seeds.dim() != 1 or not 1 <= saved.streams == len(seeds):
        found = "no seeds" if seeds is None else f"seeds of shape {tuple(seeds.shape)}"
        raise StateFileError(
            f"{path} is damaged: its header says {saved.streams} streams, its tensors hold {found}; expected one seed "
            f"a stream. {STATE.advice}"
        )
    return saved


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are not finite, `info` aside, which the next step replaces."""
    numbers = {n: t for n, t in tensors.items() if t.is_floating_point() and t.numel() and "info" not in n.split(".")}
    # The extremes are NaN where anything is; they take one pass and no memory, which isfinite() of all would.
    return [name for name, t in numbers.items() if not all(end.isfinite() for end in t.aminmax())]


def check_fingerprint(path: str | PathLike[str], fingerprint: str, net: Backbone) -> None:
    """Raise if a state was adapted on another network."""
    if net.fingerprint() != fingerprint:
        raise StateFileError(
            f"{path} was saved from another model: its weights differ from this one's. Load it with the network it was "
            "adapted on, with the same weights and precision; if the adapter was cast, with a network that is cast the "
            "same way, as tribe.Backbone(net).to(torch.bfloat16)"
        )


def state_from(path: str | PathLike[str], tensors: Mapping[str, Tensor], like: Any, classes: int | None) -> Any:
    """Return the state in a file, as a copy with the device and precision of another state of its method.

    Raise if its tensors are not those of the method, or if a number is not finite or outside its bounds
    (`tribe.core.bounds`); ``classes`` is how many the network has, if that is known.
    """
    tensor_file.check_like(path, STATE, "this method's state", tensors, leaves(like))
    if names := not_finite(tensors):
        raise StateFileError(
            f"{path} holds a state that is not finite ({', '.join(names[:4])}), which can predict nothing. Use an "
            "earlier file, or start anew with tribe.adapt"
        )
    state = rebuild(like, tensors)
    if (wrong := out_of_bounds(state, classes)) is not None:
        name, number, bounds = wrong
        raise StateFileError(f"{path}: {name} holds {number:,.20g}; expected {bounds}. {STATE.advice}")
    return copy_like(state, like)
