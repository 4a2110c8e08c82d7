"""``tribe source``: what a method must know of the source data, taken once from clean training images."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

import tribe
from tribe.cli.app import app
from tribe.cli.custom import DATASET, METHOD, component_name
from tribe.cli.options import Device, build_dataset, build_network
from tribe.cli.output import errors_as_messages, print_json, stdout_to_stderr
from tribe.cli.overrides import parse_overrides
from tribe.datasets import Dataset
from tribe.engine.backbone import Backbone
from tribe.engine.precision import choose_device, deterministic, float32_precision
from tribe.engine.screening import sound
from tribe.knowledge import Knowledge, knowledge_path
from tribe.lab.workbench import Request, departures, plain_method, trained_on
from tribe.methods import Method

SHOWN = 6  # tensors that are named; a network has hundreds of weights


@app.command()
def source(
    method: Annotated[str, typer.Argument(help="Method, see `tribe list methods`, or file.py:Class.")],
    model: Annotated[
        str,
        typer.Option(
            help="Network: a name (`tribe list models`), timm/NAME, torchvision/NAME, or file.py:attribute, a "
            "module or a tribe.Backbone."
        ),
    ],
    dataset: Annotated[str, typer.Option(help="What it was trained on: mnist, cifar10, cifar100 or folder.")],
    weights: Annotated[
        Path | None, typer.Option(help="Its weights; by default those in the package or where `tribe train` puts them.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Root of the data sets, or your folder.", show_default="$TRIBE_DATA or the cache directory"),
    ] = None,
    images: Annotated[
        int | None, typer.Option(help="How many images to look at.", show_default="as the method's paper, or all")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    seed: Annotated[int, typer.Option(help="Which images, and in which order.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A .safetensors file.",
            show_default="DATA/source/METHOD_MODEL_DATASET.safetensors; a file of its own for other settings",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field of a component: dataset.size=224, eata.alpha=1. Repeatable."),
    ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written, for programs.")] = False,
) -> None:
    """Take from source images what a method needs to know; `tribe run` finds the file by itself."""
    with stdout_to_stderr(), errors_as_messages():
        where = choose_device(device)
        method, dataset = component_name(METHOD, method), component_name(DATASET, dataset)
        if (needs := tribe.methods.get(method).needs) is None:
            raise ValueError(f"{method} needs to know nothing of the source data: run it as it is")
        wanted = parse_overrides(settings, ("dataset", "model", method))
        pictures = _training_images(dataset, data, wanted["dataset"])
        net = build_network(model, weights, pictures, dataset, data, wanted["model"], where)
        student = plain_method(method, net, pictures, dataset, wanted[method])
        most = images if images is not None else getattr(student, "source_images", None)
        batches = Batches(pictures, most, batch, seed, f"{method}, {dataset}")
        root = Request(dataset, model, weights, data).root
        usual = knowledge_path(method, model, dataset, root).parent
        folder = usual if out is None else out.parent
        if folder.name == usual.name:  # of any root: there `tribe run` looks
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():  # before the work, not after it
            raise ValueError(f"there is no folder {folder} to write {out} into")
        with float32_precision("float32"), deterministic():  # the same images make the same file, and experiment
            knowledge = _learned(student, net, batches)
        unusual = departures(method, net, pictures, dataset, wanted[method])
        shaped = {field: value for field, value in unusual.items() if field in knowledge.spec}  # how it was made
        target = out or knowledge_path(method, model, dataset, root, shaped)
        told = {"model": model, "dataset": dataset, "images": batches.images, "batch": batch, "seed": seed}
        knowledge = dataclasses.replace(knowledge, spec={**told, **knowledge.spec})
        knowledge.save(target)
    if as_json:
        print_json({**_described(knowledge), "path": str(target), "bytes": target.stat().st_size})
        return
    console = Console()
    seen = f"{knowledge.spec['images']:,} images"
    console.print(f"{method} on {model}, {dataset}, {seen}: {needs}", soft_wrap=True, markup=False)
    held = [f"{name} {tuple(t.shape)}" for name, t in knowledge.tensors.items()]
    more = f" and {len(held) - SHOWN} more" if len(held) > SHOWN else ""
    console.print(f"holds {', '.join(held[:SHOWN])}{more}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"{target}, {target.stat().st_size:,} bytes", soft_wrap=True, highlight=False, markup=False)


def _training_images(name: str, data: Path | None, fields: dict[str, object]) -> Dataset:
    """The clean images a network was trained on."""
    known = {field.name for field in dataclasses.fields(tribe.datasets.get(name))}  # type: ignore[arg-type]
    split = {"split": "train"} if "split" in known else {}
    if "root" in known and data is None and "root" not in fields:
        raise ValueError(f"--dataset {name} needs --data DIR, the folder of the pictures")
    pictures = build_dataset(name, data, None, split | fields)
    if (clean := trained_on(pictures, name)) != name:
        there = f"--dataset {clean}" if clean in tribe.datasets.names() else "--dataset folder --data DIR"
        raise ValueError(f"{name} holds corrupted images; source knowledge comes from the clean ones: {there}")
    return pictures


def _learned(student: Method, net: Backbone, batches: "Batches") -> Knowledge:
    """What a method takes from source images; where it had too few of them, which options give it more."""
    try:
        return student.study(net, batches)
    except ValueError as error:
        if len(batches) > 1:
            raise
        raise ValueError(f"{error}. Here: --images and --batch, which made 1 batch of {batches.images}") from error


class Batches:
    """Images of all domains in a random order, in batches of one size, with a bar for whoever watches.

    Left out are pictures that could not be read, where the data set lets them pass, and a short last batch unless it is
    all there is: batch statistics of a few images say little, and the gradients of a batch grow as it shrinks.
    """

    def __init__(self, dataset: Dataset, most: int | None, batch: int, seed: int, title: str) -> None:
        if batch < 1:
            raise ValueError(f"--batch is how many images at a time, at least 1; got {batch}")
        if most is not None and most < 1:
            raise ValueError(f"--images is how many to look at, at least 1; got {most}")
        self.dataset, self.title = dataset, title
        labels = [dataset.labels(domain) for domain in dataset.domains]
        self._label = torch.cat(labels)
        self._domain = torch.cat([torch.full_like(y, i) for i, y in enumerate(labels)])
        self._index = torch.cat([torch.arange(len(y)) for y in labels])
        order = torch.randperm(len(self._label), generator=torch.Generator().manual_seed(seed))[:most]
        parts = order.split(batch)
        self._parts = parts[:-1] if len(parts) > 1 and len(parts[-1]) < batch else parts

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def images(self) -> int:
        """How many images they hold."""
        return sum(len(part) for part in self._parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in track(self._parts, self.title, console=Console(stderr=True)):
            x, y = zip(*(self._read(i, part) for i in self._domain[part].unique().tolist()), strict=True)
            images, labels = torch.cat(x), torch.cat(y)
            readable = sound(images, 1)
            if bool(readable.any()):
                yield images[readable], labels[readable]

    def _read(self, domain: int, part: Tensor) -> tuple[Tensor, Tensor]:
        mine = part[self._domain[part] == domain]
        return self.dataset.images(self.dataset.domains[domain], self._index[mine]), self._label[mine]


def _described(knowledge: Knowledge) -> dict[str, object]:
    tensors = {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in knowledge.tensors.items()
    }
    return {"method": knowledge.method, "tensors": tensors, "spec": dict(knowledge.spec), "digest": knowledge.digest}
