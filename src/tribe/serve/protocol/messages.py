"""What a request asks for and what an answer says, whatever the wire format."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tribe.serve.protocol.errors import BadInput, NotFound, TooLarge

VERSION = "1"  # of the model, in the protocol's sense: the server has one
INPUT = "images"  # the name of the only input

Images = NDArray[Any]  # (B, ...), uint8 from 0 to 255, or floating point in [0, 1]
Fact = bool | int | float | str  # what a parameter of the protocol may be


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients need to know of the model that is served."""

    name: str
    shape: tuple[int | None, ...]  # of one image, such as (3, 32, 32); None: any size
    classes: int
    output: str = "logits"  # the name of the only output: logits or probabilities
    labels: tuple[str, ...] = ()  # names of the classes, if known
    method: str = ""
    most_images: int = 1024  # in one request

    def check(self, name: str, version: str = "") -> None:
        """Refuse another model or version."""
        if name != self.name:
            raise NotFound(f"there is no model {name[:80]!r}; this server has the model {self.name!r}")
        if version not in ("", VERSION):
            raise NotFound(
                f"model {name!r} has no version {version[:80]!r}; leave the version out, or give {VERSION!r}"
            )

    def check_images(self, shape: tuple[int, ...]) -> None:
        """Refuse images of another shape (B, ...)."""
        fits = len(shape) == len(self.shape) + 1 and all(
            size == wanted or (wanted is None and size > 0) for size, wanted in zip(shape[1:], self.shape, strict=True)
        )
        if not fits:
            raise BadInput(f"images have the shape {show_shape(shape)}; expected {self.expected}")
        if shape[0] < 1:
            raise BadInput(f"there are no images: the shape is {show_shape(shape)}; expected at least one image")
        if shape[0] > self.most_images:
            raise TooLarge(f"there are {shape[0]} images; expected {self.most_images} at most in one request")

    @property
    def expected(self) -> str:
        """The shape of images, in words."""
        return f"{show_shape(('B', *self.shape))}, where B is the number of images"


def show_shape(shape: tuple[int | str | None, ...]) -> str:
    """A shape as people write it; any size is ``*``.

    >>> show_shape(("B", 3, None, None))
    '(B, 3, *, *)'
    """
    return f"({', '.join('*' if size is None else str(size) for size in shape)})"


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that a request asks for."""

    name: str
    binary: bool  # as bytes after the JSON, not as numbers in it


@dataclass(frozen=True, slots=True)
class Request:
    """Images to predict, and the stream that learns from them."""

    images: Images
    stream: str | None = None  # None: the source model predicts
    id: str | None = None  # of the request: a second one with the same id does not learn
    start: bool = False  # create the stream if there is none
    end: bool = False  # store the stream and release it afterwards
    timeout: int | None = None  # microseconds until the answer must be there
    learn: bool = True
    outputs: tuple[Wanted, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Logits of the images of a request, and what is known of the stream."""

    logits: NDArray[np.float32]  # (B, K)
    stream: str | None = None
    adapted: bool = False
    clock: int | None = None  # images that the stream has learned from
    generation: int | None = None  # of the stream's owner
    health: Mapping[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Fact]:
        """What an answer says beside the logits, as parameters of the protocol."""
        found: dict[str, Fact] = {"tribe_adapted": self.adapted}
        for name, value in (("stream", self.stream), ("clock", self.clock), ("generation", self.generation)):
            if value is not None:
                found[f"tribe_{name}"] = value
        for name, given in self.health.items():
            value = ",".join(given) if name == "alarms" else given
            if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
                found[f"tribe_health_{name}"] = value
        return found
