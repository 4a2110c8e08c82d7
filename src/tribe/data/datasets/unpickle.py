"""Read a pickle that holds numbers, strings, lists, dictionaries and byte arrays, without running anything in it.

A pickle is a program that names functions and calls them. The Python versions of CIFAR are published as pickles. This
reader interprets the few operations that they use. It imports nothing that a file names and calls nothing that a file
asks for: an array is bytes with a shape. Memory stays within a small multiple of the size of the file, and time within
a number of operations: values are shared, never copied, printed, compared or hashed as a whole, because a few bytes can
describe a tuple of tuples that takes for ever to walk through.
"""

import math
import mmap
import pickletools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from tribe.io.files import NotRegular, open_regular

LARGEST = 200_000_000  # bytes of a file; CIFAR-100's training set has 155 MB
OPERATIONS = 1_000_000  # of a file; CIFAR-100's training set needs under 300,000
AXES = 8  # of an array; CIFAR's have two


class UnpickleError(ValueError):
    """A pickle that cannot be used, and why."""


class Name(str):
    """A name in the file, such as "numpy.dtype". It is never imported."""


class _Array:
    """An array: first without contents, then with them."""

    value: Any = None


ATOMS = {str, bytes, int, float, bool, type(None)}  # what a key of a dictionary may be
BYTE = object()  # the only type that the elements of an array may have
RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")  # numpy 1, numpy 2
PERMITTED = (*RECONSTRUCT, "numpy.ndarray", "numpy.dtype", "_codecs.encode")


class Machine:
    """Interprets the operations of one pickle."""

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}
        self.spare = size  # bytes that may still be made from the file's strings

    def action(self, operation: str) -> "Action | None":
        """What an operation does; None if it is not permitted."""
        return ACTIONS.get(operation)

    def run(self, data: mmap.mmap | IO[bytes]) -> Any:
        """The value that a pickle holds."""
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):  # type: ignore[arg-type]
            if operation.name == "STOP":
                return self.pop(1)[0]
            if count == OPERATIONS:
                raise UnpickleError(f"it has more than {OPERATIONS:,} operations")
            action = self.action(operation.name)
            if action is None:
                raise UnpickleError(f"it uses the operation {operation.name}, which no data file needs")
            action(self, argument)
        raise UnpickleError("it ends too early")

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def push_string(self, text: str) -> None:
        """Put a string of Python 2 on the stack: bytes."""
        self.push(text.encode("latin1"))

    def pop(self, count: int) -> list[Any]:
        """Take the last values from the stack."""
        if count > len(self.stack):
            raise UnpickleError("it takes more values than it has")
        start = len(self.stack) - count
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def mark(self) -> None:
        """Begin the items of a list, dictionary or tuple."""
        self.below.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Take the values since the last mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def memoize(self, place: int | None) -> None:
        """Remember the last value."""
        self.memo[len(self.memo) if place is None else place] = self.stack[-1]

    def recall(self, place: int) -> None:
        """Put a remembered value on the stack."""
        found = self.memo[place]
        self.push(found if not isinstance(found, _Array) or found.value is None else found.value)

    def name(self, text: str) -> None:
        """Put a name on the stack that the file wants to import."""
        if text not in PERMITTED:
            raise UnpickleError(f"it uses {text}, which no data file needs")
        self.push(Name(text))

    def extend(self, items: Sequence[Any]) -> None:
        """Append to the list below."""
        if type(self.stack[-1]) is not list:
            raise UnpickleError("it appends to something that is not a list")
        self.stack[-1].extend(items)

    def update(self, items: Sequence[Any]) -> None:
        """Set items of the dictionary below."""
        if type(self.stack[-1]) is not dict:
            raise UnpickleError("it sets items of something that is not a dictionary")
        self.stack[-1].update(as_dict(items))

    def reduce(self) -> None:
        """Make the result of a call in the file; only a few are permitted, and none takes place."""
        function, arguments = self.pop(2)
        if not isinstance(function, Name) or type(arguments) is not tuple:
            raise UnpickleError("it calls something that is not a function")
        first, second, *_ = *map(_text, arguments[:2]), "", ""
        if function in RECONSTRUCT:
            self.push(_Array())
        elif function == "numpy.dtype":
            if first != "u1":
                raise UnpickleError(f"an array has elements of type {first[:20]!r}; expected bytes (uint8)")
            self.push(BYTE)
        elif function == "_codecs.encode" and len(arguments) == 2 and second == "latin1":  # bytes in protocol 2
            if type(arguments[0]) is not str or len(first) > self.spare:
                raise UnpickleError("it makes more bytes than it holds")
            self.spare -= len(first)
            self.push(first.encode("latin1"))
        else:
            raise UnpickleError(f"it calls {function}; expected bytes in latin1")

    def build(self) -> None:
        """Give an array its contents; nothing else in a data file has any."""
        built, state = self.pop(2)
        self.push(built)
        if built is BYTE:
            return  # byte order and alignment, which bytes do not have
        if not isinstance(built, _Array) or type(state) is not tuple or len(state) != 5:
            raise UnpickleError("it changes something that is not an array")
        _, shape, dtype, fortran, content = state
        if type(shape) is not tuple or len(shape) > AXES:
            raise UnpickleError(f"the shape of an array is not a tuple of at most {AXES} sizes")
        if not all(type(size) is int and 0 <= size <= LARGEST for size in shape):
            raise UnpickleError("the shape of an array is not a tuple of whole numbers, or is larger than the file")
        if dtype is not BYTE or type(content) is not bytes or math.prod(shape) != len(content):
            raise UnpickleError(f"an array is not {math.prod(shape)} bytes (uint8)")
        order: Literal["F", "C"] = "F" if type(fortran) in (bool, int) and fortran else "C"
        built.value = np.frombuffer(content, np.uint8).reshape(shape, order=order)
        self.stack[-1] = built.value


def as_dict(items: Sequence[Any]) -> dict[Any, Any]:
    """A dictionary of keys and values that follow each other. The keys of data files are names."""
    if not all(type(key) in ATOMS for key in items[::2]):
        raise UnpickleError("a key of a dictionary is neither a name nor a number")
    return dict(zip(items[::2], items[1::2], strict=True))


def _text(value: Any) -> str:
    """A string of Python 2 or 3; empty for any other value."""
    return value.decode("latin1") if type(value) is bytes else value if type(value) is str else ""


def _nothing(machine: Machine, _: Any) -> None:
    """An operation without effect."""


Action = Callable[[Machine, Any], None]
ACTIONS: dict[str, Action] = {
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "MARK": lambda machine, _: machine.mark(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_mark())),
    "LIST": lambda machine, _: machine.push(machine.pop_mark()),
    "DICT": lambda machine, _: machine.push(as_dict(machine.pop_mark())),
    "APPEND": lambda machine, _: machine.extend(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.update(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.pop_mark()),
    "GLOBAL": lambda machine, text: machine.name(text.replace(" ", ".")),
    "STACK_GLOBAL": lambda machine, _: machine.name(".".join(map(_text, machine.pop(2)))),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
    **dict.fromkeys(("PROTO", "FRAME"), _nothing),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), Machine.memoize),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Machine.recall),
    **dict.fromkeys(("INT", "LONG", "LONG1", "BININT", "BININT1", "BININT2", "BINFLOAT", "FLOAT"), Machine.push),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"), Machine.push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES"), Machine.push),
    # The strings of Python 2 are bytes.
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), Machine.push_string),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
}


def unpickle(path: Path) -> Any:
    """Read a file; strings of Python 2 come as bytes.

    Raises:
        UnpickleError: the file asks for a name that is not permitted, holds other arrays than bytes, or is cut short.
    """
    try:
        with open_regular(path, LARGEST) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Machine(len(data)).run(data)
    except NotRegular as error:
        raise UnpickleError(f"{path} cannot be read as a pickle: {error.strerror}") from error
    except UnpickleError as error:
        raise UnpickleError(f"{path} is refused: {error}. It may be malicious: get it from its publisher") from error
    except (ValueError, TypeError, LookupError, RecursionError, ArithmeticError, MemoryError) as error:
        raise UnpickleError(
            f"{path} cannot be read as a pickle ({error}): it was cut short, or it is not a pickle"
        ) from error
