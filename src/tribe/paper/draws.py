"""One method many times, and the same in plain PyTorch: what ``python -m benchmarks.textbook --json`` measured.

Where a method collapses, when it does is chance: one stream says little, but many say whether two codes do the same.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tribe.fields import is_number
from tribe.lab import statistics
from tribe.lab.experiment import Experiment

KINDS = {"inst": "instance", "cat": "category"}  # of errors
LIVE = "live-"  # data that are corrupted as they are read: every draw has other noise
SURE = 2.0  # standard errors within which a difference may be chance


@dataclass(frozen=True)
class Draws:
    """Errors in several draws, all else the same."""

    dataset: str
    images: str  # fingerprint of what lay on the disk
    model: str
    weights: str  # the network's fingerprint
    method: str  # with its default settings
    imbalance: float
    seed: int
    batch: int
    precision: str
    device: str
    ours: Mapping[str, Sequence[float]]  # by kind, a number a draw, in percent
    textbook: Mapping[str, Sequence[float]]  # in plain PyTorch, on the same images

    @property
    def what(self) -> str:
        """What differs between the draws."""
        noise = self.dataset.startswith(LIVE)
        return "other noise in the images" if noise else "these images, the last digits of the parameters moved"

    @property
    def times(self) -> int:
        """How many draws."""
        return len(self.ours["inst"])

    def are_of(self, experiment: Experiment) -> bool:
        """Whether an experiment is the same but for what is drawn."""
        e = experiment
        here = self.method, self.model, self.weights, self.precision, self.device, self.batch, (self.seed,)
        there = e.method.name, e.model.name, e.weights, e.precision, e.device, e.batch, e.seeds
        alike = here == there and self.imbalance == e.scenario.fields.get("imbalance")
        drawn = self.dataset == f"{LIVE}{e.dataset.name}"
        return alike and (drawn or (self.dataset, self.images) == (e.dataset.name, e.images))

    def mean(self, kind: str) -> float:
        """Our error."""
        return statistics.spread(self.ours[kind]).mean

    def difference(self, kind: str) -> tuple[float, float | None]:
        """Ours minus the textbook's, and the standard error of that; None: of a single draw nothing is known."""
        pairs = zip(self.ours[kind], self.textbook[kind], strict=True)
        told = statistics.spread([ours - theirs for ours, theirs in pairs])
        return told.mean, None if told.deviation is None else told.deviation / math.sqrt(self.times)

    @property
    def agree(self) -> bool | None:
        """Whether ours and the textbook's differ by no more than chance may do; None: too few draws."""
        gaps = [self.difference(kind) for kind in KINDS]
        known = [abs(mean) <= SURE * error for mean, error in gaps if error is not None]
        return all(known) if known else None


def read_draws(path: Path) -> Draws:
    """Draws from a file, or what is wrong with it."""
    try:
        told = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON, or was cut short: {error}. {_remedy(path)}") from error
    names = [field.name for field in dataclasses.fields(Draws)]
    if lacking := [name for name in names if not isinstance(told, dict) or name not in told]:
        raise ValueError(f"{path} lacks {', '.join(lacking)}. {_remedy(path)}")
    for who in ("ours", "textbook"):
        if not all(_are_errors(told[who], kind) for kind in KINDS):
            raise ValueError(f"{path} lacks a number for every draw in {who}, {' and '.join(KINDS)}. {_remedy(path)}")
    if len({len(told[who][kind]) for who in ("ours", "textbook") for kind in KINDS}) > 1:
        raise ValueError(f"{path} has not as many draws of ours as of the textbook, of each kind. {_remedy(path)}")
    return Draws(**{name: told[name] for name in names})


def _are_errors(told: Any, kind: str) -> bool:
    values = told.get(kind) if isinstance(told, dict) else None
    return isinstance(values, list) and bool(values) and all(map(is_number, values))


def _remedy(path: Path) -> str:
    return f"`python -m benchmarks.textbook --json {path}` measures anew; without the file, the page goes without it"
