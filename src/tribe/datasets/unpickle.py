"""Read a pickle of numbers, lists, dictionaries and numpy arrays without running code from it.

A pickle is a program: it names functions and calls them. The python versions of CIFAR are pickles. The few names in
them are permitted here; any other name is refused before it is imported.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class UnpickleError(ValueError):
    """A pickle that cannot be used, and why."""


def _dtype(kind: bytes | str, *_: Any) -> Any:
    """The dtype of an array: a copy, because the pickle then changes it; numpy rejects the flags of old files."""
    return np.dtype(kind.decode("ascii") if isinstance(kind, bytes) else kind, False, True)


def _latin1(text: str, encoding: str | bytes = "latin1") -> bytes:
    """Decode bytes as protocol 2 writes them."""
    if encoding not in ("latin1", b"latin1"):
        raise UnpickleError(f"bytes are encoded in latin1; got {encoding!r}")
    return text.encode("latin1")


_reconstruct: Callable[..., Any] = np.empty(0).__reduce__()[0]  # type: ignore[assignment]
PERMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,  # until numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,  # since numpy 2
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _latin1,
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PERMITTED:
            raise UnpickleError(f"it uses {module}.{name}, which no data file needs")
        return PERMITTED[module, name]


def unpickle(path: Path) -> Any:
    """Read a file; strings of Python 2 become bytes.

    Raises:
        UnpickleError: the file uses a name that is not permitted (nothing was called), or it is cut short.
    """
    try:
        return _Restricted(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except UnpickleError as error:
        raise UnpickleError(f"{path} is refused: {error}. It may be malicious: get it from its publisher") from error
    except OSError:
        raise
    except Exception as error:  # a file that is not a pickle can raise anything
        raise UnpickleError(
            f"{path} cannot be read as a pickle ({error}): it was cut short, or is no pickle"
        ) from error
