"""A prepared file: all that a deployment of one network needs besides its weights, and what to expect of it.

`tribe.prepare` makes it from clean images; ``tribe.adapt(net, "net.tribe")`` and ``tribe serve net.tribe`` use it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.validation import warn
from tribe.health.calibration import NAME, Calibration
from tribe.io import tensors as tensor_file
from tribe.io.json_files import check
from tribe.knowledge import Knowledge
from tribe.methods import AnyMethod, with_fields
from tribe.methods.encoding import method_for_file, method_from_file

SUFFIX = ".tribe"  # a method's name that ends in it is a file
AGAIN = "make it again with tribe prepare"
LOSS = 0.005  # a corruption is marked on the card where adapting loses more
FIRST = 32  # images of a deployment that are compared with those of the preparation
FAR, WIDE, NARROW = 2.0, 2.5, 0.2  # of the mean, in deviations; of the deviation, as a multiple: beyond any weather


class PreparedError(tensor_file.TensorFileError):
    """A prepared file that cannot be used, and why."""


PREPARED = tensor_file.Kind(
    "tribe-prepared",
    1,
    {
        **{"network": str, "method": str, "fields": dict, "inputs": dict, "class_names": [str]},
        **{"origin": {...: str}, "card": dict, "verdicts": [dict], "calibration": (dict, None)},
    },
    noun="prepared file",
    advice="`tribe prepare` makes one",
    error=PreparedError,
)


class Inputs(NamedTuple):
    """The images that a network was prepared with: its deployment should see images like them."""

    shape: tuple[int, ...]  # (C, H, W)
    low: float  # the least value
    high: float
    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]


class InputWatch:
    """Compare the first images of a deployment with those of its preparation; warn once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self._pixels, self._count, self.done = inputs, list[Tensor](), 0, False

    def __call__(self, x: Tensor, unused: Tensor | None) -> None:
        """Look at images (S, B, ...); those that are ``unused`` (S, B) are bad or padding."""
        if self.done:
            return
        own = (x.flatten(0, 1) if unused is None else x[~unused])[: FIRST - self._count]
        self._pixels.append(own.movedim(1, 0).flatten(1).double().cpu())
        self._count += len(own)
        if self._count < FIRST:
            return
        self.done, pixels, self._pixels = True, torch.cat(self._pixels, 1), []
        if words := self._differences(tuple(own.shape[1:]), pixels):
            warn(
                f"the first {FIRST} images are unlike those that the network was prepared with: {'; '.join(words)}. "
                f"Are they prepared in another way (normalised twice, resized)? If not, {AGAIN}"
            )

    def _differences(self, shape: tuple[int, ...], pixels: Tensor) -> list[str]:
        """Return words on the shape of images, and on the pixels (C, N) of each channel."""
        known, words = self.inputs, list[str]()
        if shape != known.shape:
            words.append(f"their shape is {shape}, and was {known.shape}")
        low, high, room = pixels.min().item(), pixels.max().item(), 0.5 * (known.high - known.low)
        if low < known.low - room or high > known.high + room:
            words.append(f"they reach from {low:.3g} to {high:.3g}, and did from {known.low:.3g} to {known.high:.3g}")
        if shape[0] == len(known.mean):
            mean, std = pixels.mean(1), pixels.std(1)
            usual, spread = torch.tensor([known.mean, known.std], dtype=torch.float64).clamp_min(1e-6)
            far, share = ((mean - usual).abs() / spread).max(), std / spread
            if far > FAR or share.max() > WIDE or share.min() < NARROW:
                ours, theirs = (
                    " and ".join("/".join(f"{v:.2f}" for v in t.tolist()) for t in pair)
                    for pair in ((mean, std), (usual, spread))
                )
                words.append(f"their mean and deviation are {ours}, and were {theirs}")
        return words


class CardRow(NamedTuple):
    """The errors under one corruption, as shares of the images."""

    corruption: str  # or "clean"
    images: int
    source: float
    adapting: float


class Cost(NamedTuple):
    """The time of an image on the machine that prepared the file, in milliseconds."""

    batch: int
    plain: float
    adapting: float


CARD: dict[str, Any] = {
    **{"labelled": bool, "source_accuracy": (float, None), "state_bytes": int, "machine": str, "notes": [str]},
    "rows": [{"corruption": str, "images": int, "source": float, "adapting": float}],
    "costs": [{"batch": int, "plain": float, "adapting": float}],
    "estimate_error": (float, None),
}
INPUTS: dict[str, Any] = {"shape": [int], "low": float, "high": float, "mean": [float], "std": [float]}


@dataclass(frozen=True)
class Card:
    """The numbers to expect of a deployment. ``str(card)`` is a table."""

    rows: tuple[CardRow, ...]  # clean first
    costs: tuple[Cost, ...]
    state_bytes: int  # of a stream
    labelled: bool  # False: errors are differences from what the network predicts of the clean images
    source_accuracy: float | None  # on the clean images; None without labels
    estimate_error: float | None  # of an accuracy that is estimated for a corruption that calibration has not seen
    machine: str
    notes: tuple[str, ...] = ()  # what a person should know

    def json(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self) | {
            name: [row._asdict() for row in getattr(self, name)] for name in ("rows", "costs")
        }

    def __str__(self) -> str:
        against = "the labels" if self.labelled else "the network's own predictions of the clean images"
        lines = [f"error in % against {against}{'':4}source  adapting"]
        width = len(lines[0]) - len("source  adapting")
        rows = [(row.corruption, row.source, row.adapting) for row in self.rows]
        for name, source, adapting in (*rows, ("mean of the corruptions", *mean_errors(self.rows))):
            lost = f"  loses {100 * (adapting - source):.1f}" if adapting - source > LOSS else ""
            lines.append(f"{name:{width}}{100 * source:6.1f}{100 * adapting:10.1f}{lost}")
        for cost in self.costs:
            lines.append(
                f"batch of {cost.batch}: {cost.adapting:.2f} ms an image, {cost.adapting / cost.plain:.2f} x plain "
                f"inference, on {self.machine}"
            )
        lines.append(f"a stream keeps {self.state_bytes / 1e6:.2f} MB")
        if self.estimate_error is not None:
            lines.append(f"estimates of the accuracy are off by about {100 * self.estimate_error:.1f} points")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class Prepared:
    """A prepared network: its fingerprint, how it adapts, and what to expect. Made by `tribe.prepare`."""

    network: str  # Backbone.fingerprint(exact=False)
    method: str  # the name of the method, with its guard and its filter
    fields: Mapping[str, Any]  # of all its parts, as plain data
    calibration: Calibration | None  # None without labels: then the accuracy is not estimated
    inputs: Inputs
    card: Card
    class_names: tuple[str, ...] = ()
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names of the network and of its data set
    verdicts: tuple[Mapping[str, Any], ...] = ()  # of `tribe try`, the newest last
    path: str = dataclasses.field(default="the prepared file", compare=False)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file, whole or not at all."""
        known = None if self.calibration is None else self.calibration.knowledge()
        header = {
            **{name: getattr(self, name) for name in ("network", "method", "fields", "class_names", "origin")},
            **{"inputs": self.inputs._asdict(), "card": self.card.json(), "verdicts": list(self.verdicts)},
            "calibration": None if known is None else dict(known.spec),
        }
        tensor_file.write(path, PREPARED, header, {} if known is None else known.tensors)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Prepared":
        """Read a file that `save` wrote; PreparedError says why if it cannot be read."""
        header, tensors = tensor_file.read(path, PREPARED)
        try:
            card = check(header.pop("card"), CARD, "its card")
            inputs = check(header.pop("inputs"), INPUTS, "its inputs")
            spec = header.pop("calibration")
            known = None if spec is None else Knowledge(NAME, tensors, header["network"], spec, str(path))
            made: dict[str, Any] = {
                "calibration": None if known is None else Calibration.of(known),
                "inputs": _inputs(inputs),
                "card": _card(card),
                "class_names": tuple(header.pop("class_names")),
                "verdicts": tuple(header.pop("verdicts")),
            }
        except ValueError as error:
            raise PreparedError(f"{path} is damaged: {error}. {PREPARED.advice}") from error
        return cls(**header, **made, path=str(path))

    @classmethod
    def of(cls, given: Any) -> "Prepared | None":
        """Return a prepared network, or the one in a file; None: what is given is a method, or its name."""
        if isinstance(given, Prepared):
            return given
        if isinstance(given, PathLike) or (isinstance(given, str) and given.endswith(SUFFIX)):
            return cls.load(fspath(given))
        return None

    def check(self, net: Backbone) -> None:
        """Refuse another network."""
        if self.network != net.fingerprint(exact=False):
            raise PreparedError(
                f"{self.path} was prepared for another network, or for other weights of it: {AGAIN}, for this one"
            )

    def build(self, net: Backbone) -> AnyMethod:
        """Return the method with its guard and filter; refuse another network."""
        self.check(net)
        method = method_from_file(self.path, self.method, self.fields, {})
        known = None if self.calibration is None else self.calibration.knowledge()
        return method if known is None else with_fields(method, calibration=known)

    def with_verdict(self, verdict: Mapping[str, Any]) -> "Prepared":
        """Return the same with one more verdict of `tribe try`."""
        return dataclasses.replace(self, verdicts=(*self.verdicts, dict(verdict)))

    def __str__(self) -> str:
        verdicts = [str(verdict.get("words", verdict)) for verdict in self.verdicts]
        return "\n".join([f"{Path(self.path).name}: {self.method}", str(self.card), *verdicts])


def mean_errors(rows: Sequence[CardRow]) -> tuple[float, float]:
    """Return the mean error over the corruptions: of the source, and adapting."""
    corrupted = [row for row in rows if row.corruption != "clean"]
    source, adapting = ([getattr(row, name) for row in corrupted] for name in ("source", "adapting"))
    return sum(source) / len(corrupted), sum(adapting) / len(corrupted)


def describe(method: AnyMethod) -> dict[str, Any]:
    """Return the name and the fields of a method as a prepared file holds them."""
    return {"method": method.name, "fields": method_for_file(method)}


def _card(card: Mapping[str, Any]) -> Card:
    rows = tuple(CardRow(**row) for row in card["rows"])
    costs = tuple(Cost(**cost) for cost in card["costs"])
    return Card(**{**card, "rows": rows, "costs": costs, "notes": tuple(card["notes"])})


def check_alone(**given: Any) -> None:
    """Refuse arguments beside a prepared file, which says them."""
    if named := [name for name, value in given.items() if value not in (None, False)]:
        raise ValueError(
            f"a prepared file says how the network adapts: leave out {', '.join(f'{name}=' for name in named)}, or "
            "name the method in place of the file"
        )


def _inputs(held: Mapping[str, Any]) -> Inputs:
    values: list[Any] = [tuple(held[name]) if isinstance(held[name], list) else held[name] for name in Inputs._fields]
    return Inputs(*values)
