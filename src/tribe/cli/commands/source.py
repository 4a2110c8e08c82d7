"""``tribe source``: make the source knowledge of a method, or the calibration of health, from clean source images."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from torch import Tensor

import tribe
from tribe.cli.commands import app
from tribe.cli.custom import DATASET, component_name, method_name
from tribe.cli.options import AsJson, Device, Model, Overrides, Weights, make_workbench, parse_overrides
from tribe.cli.output import Bars, messages, print_json
from tribe.core.backbone import Backbone
from tribe.core.precision import deterministic, float32_precision
from tribe.core.validation import good_images
from tribe.data.datasets import Dataset
from tribe.experiments.workbench import Workbench, build_dataset, departures, plain_method, trained_on
from tribe.health.calibration import NAME as HEALTH
from tribe.health.calibration import Calibration
from tribe.io.files import check_file, check_folder
from tribe.knowledge import FOLDER, Knowledge, knowledge_path

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
    with messages():
        name = component_name(DATASET, dataset)
        if method == HEALTH:
            make, adapts, owner = _calibrate, method_name(adapts_with), HEALTH
        else:  # a guard or a filter needs none
            make, adapts = _study, tribe.methods.parse(method_name(method)).alone
            owner = adapts
        source = SourceImages(make_workbench(model, weights, data, device), model, name, images, batch, seed)
        root = source.workbench.root(tribe.datasets.get(name))
        target = out or knowledge_path(owner, model, name, root)
        makes_folder = target.parent.name == FOLDER
        check_folder(target.parent) if makes_folder else check_file(target)
        knowledge, fields, title = make(source, adapts, parse_overrides(settings, ("dataset", "model", adapts)))
        if out is None:  # where `tribe run` searches
            target = knowledge_path(owner, model, name, root, fields)
        if makes_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        knowledge.save(target)
    size = target.stat().st_size
    if as_json:
        shapes = {
            name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for name, t in knowledge.tensors.items()
        }
        made = {"method": knowledge.method, "tensors": shapes, "spec": dict(knowledge.spec), "digest": knowledge.digest}
        print_json({**made, "path": str(target), "bytes": size})
        return
    tensors = [f"{name} {tuple(t.shape)}" for name, t in knowledge.tensors.items()]
    more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
    for line in (
        f"{method} on {model}, {name}, {knowledge.spec['images']:,} images: {title}",
        f"holds {', '.join(tensors[:SHOWN])}{more}",
        f"{target}, {size:,} bytes",
    ):
        Console().print(line, soft_wrap=True, highlight=False, markup=False)


class SourceImages(NamedTuple):
    """The clean images to learn from, and the network that has learned from them."""

    workbench: Workbench
    model: str
    dataset: str
    images: int | None  # how many; None: the default of what learns
    batch: int
    seed: int

    def prepare(self, part: str, overrides: Overrides) -> tuple[Dataset, Backbone]:
        """Return the clean images of a part, train or test (all, if there are no parts), and the network."""
        cls: Any = tribe.datasets.get(self.dataset)
        names, fields = {field.name for field in dataclasses.fields(cls)}, overrides["dataset"]
        split = {"split": part} if "split" in names else {}
        if "root" in names and self.workbench.data is None and "root" not in fields:
            raise ValueError(f"--dataset {self.dataset} needs --data DIR, the folder of the images")
        images = build_dataset(self.dataset, self.workbench.data, split | fields)
        if (clean := trained_on(images)) != self.dataset:
            option = f"--dataset {clean}" if clean in tribe.datasets.names() else "--dataset folder --data DIR"
            raise ValueError(
                f"{self.dataset} holds corrupted images; source knowledge comes from the clean ones: {option}"
            )
        return images, self.workbench.network(self.model, images, overrides["model"])


Made = tuple[Knowledge, Mapping[str, Any], str]  # source knowledge, the fields that its file is named after, a title


def _study(source: SourceImages, method: str, overrides: Overrides) -> Made:
    if (needs := tribe.methods.get(method).needs) is None:
        raise ValueError(f"{method} needs no source knowledge: run it directly")
    training, net = source.prepare("train", overrides)
    built = plain_method(method, net, training, overrides[method])
    batches = Batches(source, training, getattr(built, "source_images", None), f"{method}, {source.dataset}")
    with float32_precision("float32"), deterministic():  # the same images give the same file, and experiment
        try:
            knowledge = built.study(net, batches)
        except ValueError as error:
            if len(batches) > 1:
                raise
            raise ValueError(f"{error}. Here: --images and --batch, which made 1 batch of {batches.images}") from error
    changed = departures(method, net, training, overrides[method])
    relevant = {field: value for field, value in changed.items() if field in knowledge.spec}
    counts = {"images": batches.images, "batch": source.batch, "seed": source.seed}
    origin: dict[str, Any] = {"model": source.model, "dataset": source.dataset, **counts}
    return dataclasses.replace(knowledge, spec={**origin, **knowledge.spec}), relevant, needs


def _calibrate(source: SourceImages, method: str, overrides: Overrides) -> Made:
    held_out, net = source.prepare("test", overrides)
    built = plain_method(method, net, held_out, overrides[method])
    read = Batches(source, held_out, HELD_OUT, f"reading {source.dataset}", whole=True)
    x, y = (torch.cat(column) for column in zip(*read, strict=True))
    with float32_precision("float32"), deterministic(), Bars() as bar:
        task = bar.add_task(f"{method} plays them", total=None)
        calibration: Calibration = tribe.calibrate(
            net, x, y, method=built, seed=source.seed, progress=lambda n, of: bar.update(task, completed=n, total=of)
        )
    method = calibration.method
    knowledge, error = calibration.knowledge(), 100 * calibration.estimator.unseen
    origin = {"model": source.model, "dataset": source.dataset, "seed": source.seed}
    title = f"{method}, source accuracy {100 * calibration.accuracy:.1f} %, estimates off by about {error:.1f} points"
    spec = {**origin, **knowledge.spec}
    return dataclasses.replace(knowledge, spec=spec), {"method": method}, title


class Batches:
    """Images of all domains in random order, in batches of equal size; iterating shows a progress bar.

    Unreadable images are left out, if the data set skips them. A short last batch is left out too, unless it is the
    only one: batch statistics of few images are not reliable, and the gradients of a smaller batch are larger. With
    ``whole`` it is not.
    """

    def __init__(
        self, source: SourceImages, dataset: Dataset, usual: int | None, title: str, whole: bool = False
    ) -> None:
        most, batch = usual if source.images is None else source.images, source.batch
        if batch < 1:
            raise ValueError(f"--batch is the number of images a batch, at least 1; got {batch}")
        if most is not None and most < 1:
            raise ValueError(f"--images is the number of images, at least 1; got {most}")
        self.dataset, self.title, self._quiet = dataset, title, whole  # to read them is short
        labels = [dataset.labels(domain) for domain in dataset.domains]
        self._label = torch.cat(labels)
        self._domain = torch.cat([torch.full_like(y, i) for i, y in enumerate(labels)])
        self._index = torch.cat([torch.arange(len(y)) for y in labels])
        order = torch.randperm(len(self._label), generator=torch.Generator().manual_seed(source.seed))[:most]
        self._batches = order.split(batch)
        if len(self._batches) > 1 and len(self._batches[-1]) < batch and not whole:
            self._batches = self._batches[:-1]

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def images(self) -> int:
        """The number of images in all batches."""
        return sum(len(batch) for batch in self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with Bars() as bar:
            task = bar.add_task(self.title, total=len(self._batches), quiet=self._quiet)
            for batch in self._batches:
                x, y = [], []
                for domain in self._domain[batch].unique().tolist():
                    mine = batch[self._domain[batch] == domain]
                    x.append(self.dataset.images(self.dataset.domains[domain], self._index[mine]))
                    y.append(self._label[mine])
                images, labels = torch.cat(x), torch.cat(y)
                readable = good_images(images, 1)
                if bool(readable.any()):
                    yield images[readable], labels[readable]
                bar.advance(task)
