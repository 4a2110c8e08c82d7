"""The images of a study of health in one file, so that it can be played where no data set is.

``python -m studies.health.run --dataset cifar10-c --data data --pack FILE``

The first images of the test set calibrate, clean and corrupted as `tribe.health.calibration` plans; streams play only
the others, so that no image serves both.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.data.datasets import Dataset
from tribe.data.datasets.corrupted import to_bytes
from tribe.health.playing import Condition, Plan, choose_conditions, corrupt_images, plan_streams
from tribe.io import tensors as tensor_file
from tribe.io.tensors import Kind

HELD_OUT = 2000  # images at the beginning of the test set, for calibration alone
LONG_TAIL = 4  # a long tail of imbalance 100 keeps a quarter of the images
SEED = 0

PACK = Kind(
    "tribe-health-pack",
    1,
    {"dataset": str, "trained_on": str, "classes": int, "domains": [str], "conditions": [[str]], "per": int},
    noun="pack of images for a health study",
    advice="Make it again: python -m studies.health.run --pack",
)


class Shown:
    """Some images of each domain of a data set, in memory: what `tribe.experiments.stream.Stream` plays."""

    def __init__(self, images: dict[str, Tensor], labels: dict[str, Tensor], classes: int) -> None:
        self._images, self._labels = images, labels
        self.domains, self.classes = tuple(images), tuple(str(k) for k in range(classes))

    def labels(self, domain: str) -> Tensor:
        """Of all images of a domain."""
        return self._labels[domain]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """By their numbers."""
        return self._images[domain][index].float().div_(255)

    def first(self, count: int) -> "Shown":
        """The first images of each domain, which are in random order."""
        parts = ({name: t[:count] for name, t in given.items()} for given in (self._images, self._labels))
        return Shown(*parts, len(self.classes))


class Pack(NamedTuple):
    """All images of a study."""

    dataset: str
    trained_on: str  # the clean data set
    shown: Shown  # what streams play
    per: int  # images of each domain that streams without a long tail play
    clean: tuple[Tensor, Tensor]  # images as bytes, and labels, that calibrate
    conditions: list[Condition]
    plans: list[Plan]
    corrupted: Tensor  # bytes, the images of all plans
    places: list[Tensor]  # of each plan, (N,): where its images are in `corrupted`


def make(dataset: Dataset, clean: Dataset, name: str, trained_on: str, per: int) -> Pack:
    """Choose and read the images of a study."""
    labels, index = clean.labels(clean.domains[0])[:HELD_OUT], torch.arange(HELD_OUT)
    images = clean.images(clean.domains[0], index)
    conditions = choose_conditions(images.shape[1:], None)
    plans = plan_streams(labels, conditions, SEED)
    key = torch.cat([plan.condition * HELD_OUT + plan.number for plan in plans])
    unique, inverse = key.unique(return_inverse=True)
    given = [conditions[int(k) // HELD_OUT] for k in unique]
    corrupted = to_bytes(corrupt_images(images, unique % HELD_OUT, given, SEED))
    places = list(inverse.split([len(plan.number) for plan in plans]))
    chosen = _choose(dataset, per * LONG_TAIL)
    shown = {d: to_bytes_again(dataset.images(d, chosen[d])) for d in dataset.domains}
    shown_labels = {d: dataset.labels(d)[chosen[d]] for d in dataset.domains}
    kept = to_bytes_again(images), labels
    whole = Shown(shown, shown_labels, len(dataset.classes))
    return Pack(name, trained_on, whole, per, kept, conditions, plans, corrupted, places)


def to_bytes_again(images: Tensor) -> Tensor:
    """Images in [0, 1] that were bytes before."""
    return images.mul(255).round().to(torch.uint8)


def _choose(dataset: Dataset, count: int) -> dict[str, Tensor]:
    """Numbers of images in random order, none of those that calibrate."""
    draw = torch.Generator().manual_seed(SEED)
    rest = len(dataset.labels(dataset.domains[0])) - HELD_OUT
    return {name: HELD_OUT + torch.randperm(rest, generator=draw)[:count] for name in dataset.domains}


def save(path: Path, pack: Pack) -> None:
    """Write one file."""
    header: dict[str, Any] = {"dataset": pack.dataset, "trained_on": pack.trained_on, "per": pack.per}
    header["classes"] = len(pack.shown.classes)
    header["domains"] = list(pack.shown.domains)
    header["conditions"] = [[name, str(severity)] for name, severity in pack.conditions]
    tensors = {"clean.images": pack.clean[0], "clean.labels": pack.clean[1], "corrupted": pack.corrupted}
    for domain in pack.shown.domains:
        tensors[f"shown.{domain}.images"] = pack.shown._images[domain]
        tensors[f"shown.{domain}.labels"] = pack.shown.labels(domain)
    for plan, place in zip(pack.plans, pack.places, strict=True):
        tensors |= {f"plan.{plan.order}.{name}": t for name, t in zip(("condition", "number"), plan[1:], strict=True)}
        tensors[f"plan.{plan.order}.place"] = place
    tensor_file.write(path, PACK, header, tensors)


def load(path: Path) -> Pack:
    """Read what `save` wrote."""
    header, tensors = tensor_file.read(path, PACK)
    kinds = ("images", "labels")
    shown = [{domain: tensors[f"shown.{domain}.{kind}"] for domain in header["domains"]} for kind in kinds]
    orders = [name.split(".")[1] for name in tensors if name.startswith("plan.") and name.endswith(".place")]
    plans = [Plan(order, *(tensors[f"plan.{order}.{name}"] for name in ("condition", "number"))) for order in orders]
    return Pack(
        dataset=header["dataset"],
        trained_on=header["trained_on"],
        shown=Shown(*shown, header["classes"]),
        per=header["per"],
        clean=(tensors["clean.images"], tensors["clean.labels"]),
        conditions=[(name, int(severity)) for name, severity in header["conditions"]],
        plans=plans,
        corrupted=tensors["corrupted"],
        places=[tensors[f"plan.{order}.place"] for order in orders],
    )
