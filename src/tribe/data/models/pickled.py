"""Check a file of `torch.save` before torch reads it, without running anything in it and without much memory.

`torch.load(weights_only=True)` runs no code of the file, but it believes sizes: a file of a hundred bytes can ask for
all memory, or for a computation without an end. So the pickle in the file is interpreted first. It may hold tensors,
numbers, strings, lists and dictionaries, and each tensor must lie within the bytes that the file has for it.
"""

import io
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from tribe.data.datasets.unpickle import ATOMS, Action, Machine, Name, UnpickleError, as_dict

MOST = 4 << 20  # bytes of a pickle; that of a thousand tensors has 150 kB. The numbers of tensors lie outside
MAGIC = 0x1950A86A20F9469CFC6C  # the first value in a file of torch before version 1.6
SIZES = {
    "ByteStorage": 1,
    "CharStorage": 1,
    "BoolStorage": 1,
    "ShortStorage": 2,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "IntStorage": 4,
    "FloatStorage": 4,
    "LongStorage": 8,
    "DoubleStorage": 8,
    "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
}  # bytes of a number
TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
TYPED = "torch._tensor._rebuild_from_type_v2"  # a tensor with attributes
PLAIN = ("collections.OrderedDict", "collections.Counter", "builtins.set", "torch.Size", "torch.device")
VALUES = ("torch.Tensor", "torch.nn.parameter.Parameter", *(f"torch.{name}" for name in SIZES))
DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
PERMITTED = {*TENSORS, *PARAMETERS, TYPED, *PLAIN, *VALUES, *(f"torch.{name}" for name in DTYPES)}
SPECIAL = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor: save tensor.to_dense()",
    "torch._utils._rebuild_qtensor": "a quantised tensor: save tensor.dequantize()",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no values",
    "torch._utils._rebuild_nested_tensor": "a nested tensor: save its parts",
    "torch._utils._rebuild_tensor_v3": "a tensor of an unusual type: save tensor.float()",
}


DAMAGE = (  # what readers of zip files and pickles raise
    *(zipfile.BadZipFile, EOFError, NotImplementedError, OSError),  # OSError: a place before the start of the file
    *(ValueError, TypeError, LookupError, RecursionError, ArithmeticError),
)


class _Storage(NamedTuple):
    """The numbers that one or several tensors show."""

    numbers: int


class StateDictMachine(Machine):
    """Interprets the pickle in a file of `torch.save`; a tensor becomes None."""

    def __init__(self, sizes: dict[str, int] | None, spare: int) -> None:
        super().__init__(spare)
        self.sizes = sizes  # bytes of each storage by its key; None: they follow the pickles
        self.claimed: set[str] = set()  # the keys of storages so far

    def action(self, operation: str) -> Action | None:
        """What an operation does."""
        return MORE_ACTIONS.get(operation) or super().action(operation)

    def name(self, text: str) -> None:
        """Put a name on the stack; it is never imported."""
        if text in SPECIAL:
            raise UnpickleError(f"it holds {SPECIAL[text]}")
        if text not in PERMITTED:
            raise UnpickleError(
                f"it holds Python objects beside tensors ({text[:60]}), which could run code when read: save "
                "model.state_dict() alone, best as safetensors"
            )
        self.push(Name(text))

    def reduce(self) -> None:
        """Make a stand-in for the result of a call."""
        function, arguments = self.pop(2)
        self.push(self.called(function, arguments))

    def called(self, function: object, arguments: object) -> Any:
        """A stand-in for the result of a call: a dictionary, or None."""
        if not isinstance(function, Name) or type(arguments) is not tuple:
            raise UnpickleError("it calls something that is not a function")
        if function in TENSORS:
            _check_tensor(*arguments[:4])
        elif function == TYPED:
            self.called(arguments[0], arguments[2])
        elif function == "collections.OrderedDict":
            return as_dict([part for pair in (arguments[0] if arguments else ()) for part in pair])
        elif function == "torch.Size":
            return arguments[0]
        elif function == "builtins.set" and not all(type(item) in ATOMS for item in arguments[0]):
            raise UnpickleError("it holds a set of something that is neither a string nor a number")
        elif function not in (*PARAMETERS, *PLAIN, "torch.nn.parameter.Parameter"):
            raise UnpickleError(f"it calls {function}")
        return None

    def build(self) -> None:
        """Attributes of a dictionary, which change no tensor."""
        built, _ = self.pop(2)
        if type(built) is not dict and built is not None:
            raise UnpickleError("it changes something that is not a dictionary")
        self.push(built)

    def load_storage(self) -> None:
        """Put a storage on the stack, if the file has its bytes."""
        (identity,) = self.pop(1)
        if type(identity) is not tuple or len(identity) not in (5, 6):
            raise UnpickleError("a storage is not named as torch names it")
        word, kind, key, _, count = identity[:5]
        size = SIZES.get(str(kind).removeprefix("torch.")) if isinstance(kind, Name) else None
        if word not in ("storage", b"storage") or type(key) is not str or type(count) is not int or size is None:
            raise UnpickleError("a storage is not named as torch names it")
        if count < 0 or (self.sizes is not None and self.sizes.get(key) != count * size):
            raise UnpickleError(f"storage {key[:20]} says {count} numbers, and the file does not hold so many")
        if key not in self.claimed:
            self.claimed.add(key)
            self.spare -= count * size
        if self.spare < 0:
            raise UnpickleError("its storages say that they have more bytes than the file")
        self.push(_Storage(count))


def _load_storage(machine: Any, _: Any) -> None:
    machine.load_storage()


def _push_set(machine: Machine, _: Any) -> None:
    machine.push(None)


MORE_ACTIONS: dict[str, Action] = {"BINPERSID": _load_storage, "EMPTY_SET": _push_set}


def _check_tensor(storage: Any, offset: Any, size: Any, stride: Any) -> None:
    """Refuse a tensor that does not lie within its storage."""
    whole = [offset, *size, *stride]
    if type(storage) is not _Storage or len(size) != len(stride) or not all(type(n) is int and n >= 0 for n in whole):
        raise UnpickleError("a tensor has no storage, shape and strides of whole numbers")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= storage.numbers:
        raise UnpickleError(f"a tensor of shape {tuple(size)} is larger than its storage of {storage.numbers} numbers")


def check_saved(path: Path) -> None:
    """Raise UnpickleError if a file is not a state dict that `torch.load` reads within the file's size."""
    with path.open("rb") as file:
        spare = os.fstat(file.fileno()).st_size
        try:
            start = file.read(4)
            file.seek(0)
            if start == b"PK\x03\x04":
                _check_zip(file, spare)
            else:
                _check_legacy(io.BytesIO(file.read(MOST)), spare)
        except UnpickleError:
            raise
        except DAMAGE as error:
            raise UnpickleError(
                f"it was cut short, or it is damaged ({type(error).__name__}: {str(error)[:80]})"
            ) from error


def _check_zip(file: Any, spare: int) -> None:
    """A file of torch 1.6 and later: a zip file of a pickle and a record for each storage."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries.values())
        if not plain or len(entries) < len(archive.infolist()) or sum(e.file_size for e in entries.values()) > spare:
            raise UnpickleError("its records are compressed, occur twice or are larger than the file")
        pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1 or entries[pickles[0]].file_size > MOST:
            raise UnpickleError(f"it has no pickle of at most {MOST:,} bytes, as torch.save writes it")
        data = f"{pickles[0].removesuffix('data.pkl')}data/"
        sizes = {n.removeprefix(data): entry.file_size for n, entry in entries.items() if n.startswith(data)}
        StateDictMachine(sizes, spare).run(io.BytesIO(archive.read(pickles[0])))


def _check_legacy(start: io.BytesIO, spare: int) -> None:
    """A file of torch before 1.6: five pickles, then the storages."""
    if Machine(spare).run(start) != MAGIC:
        raise UnpickleError("it does not begin as torch.save begins")
    for _ in range(2):  # the version and the byte order
        Machine(spare).run(start)
    StateDictMachine(None, spare).run(start)
