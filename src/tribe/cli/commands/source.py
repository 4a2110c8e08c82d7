"""``tribe source``: make the source knowledge of a method, or the calibration of health, from clean source images."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress, track
from torch import Tensor

import tribe
from tribe.cli.app import app
from tribe.cli.custom import DATASET, component_name, method_name
from tribe.cli.options import AsJson, Device, Model, Weights, build_dataset, build_network
from tribe.cli.output import errors_as_messages, print_json, stdout_to_stderr
from tribe.cli.overrides import parse_overrides
from tribe.core.backbone import Backbone
from tribe.core.precision import choose_device, deterministic, float32_precision
from tribe.core.validation import good_images
from tribe.data.datasets import Dataset
from tribe.experiments.workbench import Request, departures, plain_method, trained_on
from tribe.health.calibration import NAME as HEALTH
from tribe.health.calibration import Calibration
from tribe.io.files import check_file, check_folder
from tribe.knowledge import Knowledge, knowledge_path
from tribe.methods import AnyMethod

SHOWN = 6  # tensors that are listed; a network has hundreds of weights
HELD_OUT = 2000  # images for health


@app.command()
def source(
    method: Annotated[str, typer.Argument(help="Method, see `tribe list methods`, or file.py:Class; or health.")],
    model: Model,
    dataset: Annotated[
        str,
        typer.Option(help="Data set that the network was trained on: mnist, cifar10, cifar100, imagenet or folder."),
    ],
    weights: Weights = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Root of the data sets, or your folder.", show_default="$TRIBE_DATA or the cache directory"),
    ] = None,
    adapts_with: Annotated[
        str, typer.Option("--method", help="For health: the method that will adapt, or file.py:Class.")
    ] = "tribe",
    images: Annotated[
        int | None,
        typer.Option(help="Number of images.", show_default="as in the method's paper, or all; 2000 for health"),
    ] = None,
    batch: Annotated[int, typer.Option(help="Images a batch.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the choice and order of the images.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A .safetensors file.",
            show_default="DATA/source/METHOD_MODEL_DATASET.safetensors; other settings get another file",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field of a component: dataset.size=224, eata.alpha=1. Repeatable."),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Make the source knowledge that a method needs; `tribe run` finds the file. Or calibrate health.

    Methods learn from training images. Health learns how accurate a method is from images that no training used: the
    test images of a data set, or the images of a folder.
    """
    with stdout_to_stderr(), errors_as_messages():
        where = choose_device(device)
        dataset = component_name(DATASET, dataset)
        wanted = Wanted(model, dataset, weights, data, images, batch, seed, out, settings, where)
        knowledge, target, title = (
            _health(wanted, method_name(adapts_with))
            if method == HEALTH
            else _of_method(
                wanted, tribe.methods.parse(method_name(method)).alone
            )  # a guard or a time filter needs none
        )
        if _is_made(wanted.folder, target):
            target.parent.mkdir(parents=True, exist_ok=True)
        knowledge.save(target)
    if as_json:
        print_json({**_describe(knowledge), "path": str(target), "bytes": target.stat().st_size})
        return
    tensors = [f"{name} {tuple(t.shape)}" for name, t in knowledge.tensors.items()]
    more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
    for line in (
        f"{method} on {model}, {dataset}, {knowledge.spec['images']:,} images: {title}",
        f"holds {', '.join(tensors[:SHOWN])}{more}",
        f"{target}, {target.stat().st_size:,} bytes",
    ):
        Console().print(line, soft_wrap=True, highlight=False, markup=False)


class Wanted(NamedTuple):
    """The options of the command."""

    model: str
    dataset: str
    weights: Path | None
    data: Path | None
    images: int | None
    batch: int
    seed: int
    out: Path | None
    settings: list[str] | None
    device: torch.device

    @property
    def root(self) -> Path:
        """The folder of the data sets."""
        return Request(self.dataset, self.model, self.weights, self.data).root

    @property
    def folder(self) -> Path:
        """Where `tribe run` searches."""
        return knowledge_path("any", self.model, self.dataset, self.root).parent

    def prepare(self, split: str, overrides: dict[str, dict[str, Any]]) -> tuple[Dataset, Backbone]:
        """The clean images and the network."""
        clean = _clean_images(self.dataset, self.data, overrides["dataset"], split)
        fields = overrides["model"]
        return clean, build_network(self.model, self.weights, clean, self.dataset, self.data, fields, self.device)


def _of_method(wanted: Wanted, method: str) -> tuple[Knowledge, Path, str]:
    """The source knowledge of a method, where it goes, and what it is."""
    if (needs := tribe.methods.get(method).needs) is None:
        raise ValueError(f"{method} needs no source knowledge: run it directly")
    overrides = parse_overrides(wanted.settings, ("dataset", "model", method))
    _check_output(wanted.folder, wanted.out)
    training, net = wanted.prepare("train", overrides)
    built = plain_method(method, net, training, wanted.dataset, overrides[method])
    most = wanted.images if wanted.images is not None else getattr(built, "source_images", None)
    batches = Batches(training, most, wanted.batch, wanted.seed, f"{method}, {wanted.dataset}")
    with float32_precision("float32"), deterministic():  # the same images give the same file, and experiment
        knowledge = _study(built, net, batches)
    changed = departures(method, net, training, wanted.dataset, overrides[method])
    relevant = {field: value for field, value in changed.items() if field in knowledge.spec}
    target = wanted.out or knowledge_path(method, wanted.model, wanted.dataset, wanted.root, relevant)
    counts = {"images": batches.images, "batch": wanted.batch, "seed": wanted.seed}
    origin: dict[str, Any] = {"model": wanted.model, "dataset": wanted.dataset, **counts}
    return dataclasses.replace(knowledge, spec={**origin, **knowledge.spec}), target, needs


def _health(wanted: Wanted, method: str) -> tuple[Knowledge, Path, str]:
    """The calibration of a method on a network, where it goes, and what it is."""
    overrides = parse_overrides(wanted.settings, ("dataset", "model", method))
    _check_output(wanted.folder, wanted.out)
    held_out, net = wanted.prepare("test", overrides)
    built = plain_method(method, net, held_out, wanted.dataset, overrides[method])
    most = HELD_OUT if wanted.images is None else wanted.images
    read = Batches(held_out, most, wanted.batch, wanted.seed, f"reading {wanted.dataset}", whole=True)
    x, y = (torch.cat(column) for column in zip(*read, strict=True))
    with float32_precision("float32"), deterministic(), Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{method} plays them", total=None)
        calibration: Calibration = tribe.calibrate(
            net, x, y, method=built, seed=wanted.seed, progress=lambda n, of: bar.update(task, completed=n, total=of)
        )
    method = tribe.methods.parse(method).unfiltered  # what was calibrated
    target = wanted.out or knowledge_path(HEALTH, wanted.model, wanted.dataset, wanted.root, {"method": method})
    known, error = calibration.knowledge(), 100 * calibration.estimator.unseen
    origin = {"model": wanted.model, "dataset": wanted.dataset, "seed": wanted.seed}
    title = f"{method}, source accuracy {100 * calibration.accuracy:.1f} %, estimates off by about {error:.1f} points"
    return dataclasses.replace(known, spec={**origin, **known.spec}), target, title


def _check_output(default: Path, out: Path | None) -> None:
    """Raise OSError if the file cannot be written. The folder where `tribe run` searches may be missing."""
    if out is None or _is_made(default, out):
        check_folder(default if out is None else out.parent)
    else:
        check_file(out)


def _is_made(default: Path, target: Path) -> bool:
    """Whether this command makes the folder of a file: it is where `tribe run` searches, in any data root."""
    return target.parent.name == default.name


def _clean_images(name: str, data: Path | None, fields: dict[str, object], part: str) -> Dataset:
    """The clean images of a part, train or test, of a data set; of all it has, if it has no parts."""
    names = {field.name for field in dataclasses.fields(tribe.datasets.get(name))}  # type: ignore[arg-type]
    split = {"split": part} if "split" in names else {}
    if "root" in names and data is None and "root" not in fields:
        raise ValueError(f"--dataset {name} needs --data DIR, the folder of the images")
    images = build_dataset(name, data, None, split | fields)
    if (clean := trained_on(images, name)) != name:
        option = f"--dataset {clean}" if clean in tribe.datasets.names() else "--dataset folder --data DIR"
        raise ValueError(f"{name} holds corrupted images; source knowledge comes from the clean ones: {option}")
    return images


def _study(method: AnyMethod, net: Backbone, batches: "Batches") -> Knowledge:
    """The source knowledge of a method; an error about too few images names the options that give more."""
    try:
        return method.study(net, batches)
    except ValueError as error:
        if len(batches) > 1:
            raise
        raise ValueError(f"{error}. Here: --images and --batch, which made 1 batch of {batches.images}") from error


class Batches:
    """Images of all domains in random order, in batches of equal size; iterating shows a progress bar.

    Unreadable images are left out, if the data set skips them. A short last batch is left out too, unless it is the
    only one: batch statistics of few images are not reliable, and the gradients of a smaller batch are larger. With
    ``whole`` it is not.
    """

    def __init__(
        self, dataset: Dataset, most: int | None, batch: int, seed: int, title: str, whole: bool = False
    ) -> None:
        if batch < 1:
            raise ValueError(f"--batch is the number of images a batch, at least 1; got {batch}")
        if most is not None and most < 1:
            raise ValueError(f"--images is the number of images, at least 1; got {most}")
        self.dataset, self.title = dataset, title
        labels = [dataset.labels(domain) for domain in dataset.domains]
        self._label = torch.cat(labels)
        self._domain = torch.cat([torch.full_like(y, i) for i, y in enumerate(labels)])
        self._index = torch.cat([torch.arange(len(y)) for y in labels])
        order = torch.randperm(len(self._label), generator=torch.Generator().manual_seed(seed))[:most]
        batches = order.split(batch)
        short = len(batches) > 1 and len(batches[-1]) < batch and not whole
        self._batches = batches[:-1] if short else batches

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def images(self) -> int:
        """The number of images in all batches."""
        return sum(len(batch) for batch in self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in track(self._batches, self.title, console=Console(stderr=True)):
            x, y = zip(*(self._read(i, batch) for i in self._domain[batch].unique().tolist()), strict=True)
            images, labels = torch.cat(x), torch.cat(y)
            readable = good_images(images, 1)
            if bool(readable.any()):
                yield images[readable], labels[readable]

    def _read(self, domain: int, batch: Tensor) -> tuple[Tensor, Tensor]:
        mine = batch[self._domain[batch] == domain]
        return self.dataset.images(self.dataset.domains[domain], self._index[mine]), self._label[mine]


def _describe(knowledge: Knowledge) -> dict[str, object]:
    tensors = {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in knowledge.tensors.items()
    }
    return {"method": knowledge.method, "tensors": tensors, "spec": dict(knowledge.spec), "digest": knowledge.digest}
