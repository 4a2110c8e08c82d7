"""State files: what an adapter saves. They hold its state, its method's fields and a fingerprint of the source model.

A state that is not finite could never predict anything again: it is neither written nor read.
"""

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tribe.engine.backbone import Backbone
from tribe.engine.state import per_stream
from tribe.storage import tensors as tensor_file
from tribe.storage.tensors import Kind, TensorFileError


class StateFileError(TensorFileError):
    """A state file that cannot be used, and why."""


class Saved(NamedTuple):
    """What a state file holds."""

    method: str
    fields: dict[str, Any]
    streams: int
    frozen: bool
    fingerprint: str
    tensors: dict[str, Tensor]


STATE = Kind(
    "tribe-state",
    1,
    {"method": str, "fields": dict, "streams": int, "frozen": bool, "fingerprint": str},
    noun="tribe state file",
    advice="Use a file that Adapter.save wrote, or start anew with tribe.adapt",
    error=StateFileError,
    needs_digest=False,
)


SLACK = 2**20  # numbers in a tensor that a method may make beside its state


def write(path: str | PathLike[str], saved: Saved) -> None:
    """Write a state file; refuse a state that is not finite."""
    if names := not_finite(saved.tensors):
        rows = [per_stream(saved.tensors[name], saved.streams).isfinite().flatten(1).all(1) for name in names]
        which = ", ".join(str(i) for i in range(saved.streams) if not all(row[i] for row in rows))
        raise StateFileError(
            f"the state of stream {which} is not finite ({', '.join(names[:4])}), so it can predict nothing any more: "
            f"reset(stream=...) starts it anew, restore(snapshot) goes back. Nothing was written to {path}"
        )
    header = saved._asdict()
    tensor_file.write(path, STATE, header, header.pop("tensors"))


def read(path: str | PathLike[str]) -> Saved:
    """Read a state file, or say why it is not one."""
    header, tensors = tensor_file.read(path, STATE)
    saved = Saved(**header, tensors=tensors)
    # The file's own tensors must agree with its header before a state of that many streams is allocated.
    seeds = tensors.get("key.seed")
    if seeds is None or seeds.dim() != 1 or not 1 <= saved.streams == len(seeds):
        found = "no seeds" if seeds is None else f"seeds of shape {tuple(seeds.shape)}"
        raise StateFileError(
            f"{path} is damaged: its header says {saved.streams} streams, its tensors hold {found}; expected one seed "
            f"a stream. {STATE.advice}"
        )
    return saved


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that are not finite; `info` does not count, since the next step replaces it."""
    numbers = {n: t for n, t in tensors.items() if t.is_floating_point() and t.numel() and not n.startswith("info.")}
    # The extremes are NaN where anything is; they take one pass and no memory, which isfinite() of all would.
    return [name for name, t in numbers.items() if not all(end.isfinite() for end in t.aminmax())]


class SizeLimit(TorchDispatchMode):
    """Refuse, before it is allocated, a tensor far larger than all that a state file holds.

    The settings in a file decide the sizes of a state (classes, places of a memory, values of an image). A method makes
    its state in this context, so that settings that do not belong to the file's tensors cost no memory.
    """

    def __init__(self, path: str | PathLike[str], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.path = path
        self.most = SLACK + max((t.numel() for t in tensors.values()), default=0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = max((t.numel() for t in args if isinstance(t, Tensor)), default=0)
        shapes = [a for a in args if isinstance(a, list | tuple) and all(type(n) is int and n >= 0 for n in a)]
        self._check(max(map(math.prod, shapes), default=0), given)
        result = func(*args, **(kwargs or {}))
        self._check(
            result.numel() if isinstance(result, Tensor) else 0, given
        )  # a view of sizes that are not known yet
        return result

    def _check(self, count: int, given: int) -> None:
        """Refuse a tensor of so many numbers, unless the operation was given a tensor as large."""
        if count > max(self.most, given):
            raise StateFileError(
                f"{self.path} is damaged: by its settings a tensor of its state has {count} numbers or more, and none "
                f"in the file has more than {self.most - SLACK}. {STATE.advice}"
            )


def check_fingerprint(path: str | PathLike[str], fingerprint: str, net: Backbone) -> None:
    """Refuse a state that was adapted on another network."""
    if net.fingerprint() != fingerprint:
        raise StateFileError(
            f"{path} was saved from another model: its weights differ from this one's. Load it with the network it was "
            "adapted on, with the same weights and precision; if the adapter was cast, with a network that is cast the "
            "same way, as tribe.Backbone(net).to(torch.bfloat16)"
        )


def check_tensors(path: str | PathLike[str], tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Refuse a state that is not finite, or whose tensors are not those of the method."""
    tensor_file.check_like(path, STATE, "this method's state", tensors, like)
    if names := not_finite(tensors):
        raise StateFileError(
            f"{path} holds a state that is not finite ({', '.join(names[:4])}), which can predict nothing. Use an "
            "earlier file, or start anew with tribe.adapt"
        )
