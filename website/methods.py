"""The table of all methods: ``python -m website.methods > docs/methods.md``. Everything in it is read or measured.

What adapts and what is kept is read from the states; passes are counted on a small network over 256 images, batch 64;
sizes are those of the states that `init` makes.
"""

import functools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import tribe
from tribe.core.state import leaves
from tribe.experiments.bench.contenders import with_knowledge as studied
from tribe.experiments.store import finished
from tribe.methods import Method
from tribe.methods.cotta import AveragedTeacher
from tribe.testing import CLASSES, images, informed, small_network

ROOT = Path(__file__).resolve().parent.parent
BATCH, STEPS = 64, 4
NETWORKS = {"compact, K = 10": ("compact", 10, "mnist"), "WRN-28-10, K = 10": ("wrn28_10", 10, "cifar10")}
NETWORKS |= {"ResNet-50, K = 1000": ("resnet50", 1000, "imagenet")}
CLASSES_OF_FILTERS = (10, 100, 1000)
SHOWN = ("source", "rotta", "tribe", "delta", "sotta", "cmf", "deyo", "petta", "bdn")  # in the table of later methods
FILTERS = """
A time filter stands behind any method, as in `tribe+time`: it uses the order of the images, and the method learns as
without it. It is not part of the paper: [Time](time.md). A state is what one stream needs beside that of its method.
"""
HEADER = """# Methods

Made by `python -m website.methods`, from the code. A pass is one image through the network, forward or backward,
per image of the stream, batch {batch}; RoTTA, NOTE, PeTTA and SoTTA learn from a memory of 64, once in 64 images. CoTTA
and PETAL average 32 views where the source model is uncertain, as here; elsewhere they need 3 passes. A state is what
one stream needs beside the network, which all streams share. Variants of `selftrain` are TRIBE's ablations.

On the site each method has a page: idea, equations, errors, departures from its paper. In the source, departures are
marked NOTE.
"""
LATER = """
## Methods later than the paper

The paper compares TRIBE with the methods of its time. These are later, or not in its tables. Errors over all images of
two streams (seed 425, GLI-TTA-F, imbalance 200; ResNet-20 and the embedded network), in percent:

"""


def main() -> None:
    """Print the page."""
    print(HEADER.format(batch=BATCH))
    names = ["method", "paper", "adapts", "keeps", "source knowledge", "forward", "backward", *NETWORKS]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for name in tribe.methods.names():
        print(f"| {' | '.join(row(name))} |", flush=True)
    print("\n| variant of `selftrain` | fields |\n|---|---|")
    for variant, fields in tribe.methods.get("selftrain").variants.items():
        print(f"| `{variant}` | {', '.join(f'{k}={v!r}' for k, v in fields.items()) or 'all defaults'} |")
    print(FILTERS)
    names = ["time filter", "paper", *(f"state, K = {classes}" for classes in CLASSES_OF_FILTERS)]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for name in tribe.filters.names():
        print(f"| {' | '.join(filter_row(name))} |")
    print(LATER, end="")
    print(later_table(), end="")


def later_table() -> str:
    """The errors of the later methods and, first, of those that the paper compares with."""
    errors = later_errors()
    titles = list(dict.fromkeys(title for title, _ in errors))
    lines = [f"| method | {' | '.join(titles)} |", f"|{'---|' * (1 + len(titles))}"]
    lines += [f"| {name} | {' | '.join(errors[title, name] for title in titles)} |" for name in SHOWN]
    return "\n".join(lines) + "\n"


@functools.cache
def later_errors() -> dict[tuple[str, str], str]:
    """The errors in percent, by stream and method."""
    titles = {"cifar10-c": "CIFAR-10-C: gaussian noise, defocus blur, contrast"}
    titles |= {"live-mnist-c": "MNIST-C: shot noise, rotate, fog, stripe"}
    results = {(r.experiment.dataset.name, r.experiment.method.name): r for r in finished(ROOT / "results/later")}
    return {
        (titles[dataset], name): f"{100 * results[dataset, name].error():.1f}" for dataset in titles for name in SHOWN
    }


@functools.cache
def paths() -> dict[str, str]:
    """The file of each method, from the root of the repository."""
    modules = {name: tribe.methods.get(name).__module__ for name in tribe.methods.names()}
    return {name: f"src/{module.replace('.', '/')}.py" for name, module in modules.items()}


def row(name: str) -> list[str]:
    """A method's cells."""
    forward, backward, adapts, keeps = measured(name)
    cls = tribe.methods.get(name)
    sizes = [megabytes(name, *network) for network in NETWORKS.values()]
    link = f"[`{name}`](../{paths()[name]})"
    return [link, cite(cls.paper), adapts, keeps, cls.needs or "none", f"{forward:g}", f"{backward:g}", *sizes]


def filter_row(name: str) -> list[str]:
    """A time filter's cells."""
    rule = tribe.filters.create(name)
    sizes = [in_words(size(rule.init(1, classes, torch.empty(0)))) for classes in CLASSES_OF_FILTERS]
    return [f"`{name}`", cite(rule.paper), *sizes]


def cite(paper: str) -> str:
    """Return the authors and the venue of a reference.

    >>> cite("Wang et al., Tent: fully test-time adaptation by entropy minimization, ICLR 2021")
    'Wang et al., ICLR 2021'
    """
    first, *others = paper.partition(";")[0].split(", ")
    if paper.startswith("none: "):
        return "none"
    return f"{first}, {others[-1]}" if others else paper


def measured(name: str) -> tuple[float, float, str, str]:
    """Forward and backward passes per image, and what of the state moved."""
    fields = {"p_th": 1.1} if issubclass(tribe.methods.get(name), AveragedTeacher) else {}  # so that it averages views
    method = informed(tribe.methods.create(name, classes=CLASSES, **fields))
    net, passes = tribe.Backbone(small_network()), Counter()
    whole = type(net).forward

    def counted(self: Any, x: torch.Tensor, affine: Any, *others: Any, **named: Any) -> Any:
        passes["forward"] += x.shape[0] * x.shape[1]
        passes["backward"] += x.shape[0] * x.shape[1] * affine.weight.requires_grad
        return whole(self, x, affine, *others, **named)

    state = start = method.init(net)
    type(net).forward = counted  # type: ignore[method-assign]
    try:
        for seed in range(STEPS):
            _, state = method.step(net, state, images(1, BATCH, seed))
    finally:
        type(net).forward = whole  # type: ignore[method-assign]
    before, after = leaves(start), leaves(state)
    moved = {n for n in after if not torch.equal(before[n], after[n]) and not n.startswith(("info.", "key."))}
    return passes["forward"] / (BATCH * STEPS), passes["backward"] / (BATCH * STEPS), *describe(moved)


NOUNS = {  # for the tensors of states, by the beginning of their names
    "affine parameters": ("affine", "student.affine", "teacher.affine", "teacher.weight"),
    "all weights": ("student.weights", "teacher.weights"),
    "all weights but Linear layers'": ("weights",),  # TTAC's
    "statistics": ("stats", "pair", "anchor", "student.stats", "teacher.stats", "domains"),
    "optimiser": ("adam", "velocity"),
    "images": ("memory",),
    "a moving mean": ("mean",),
    "feature Gaussians": ("clusters", "whole"),
    "filtered parameters": ("hidden",),
}


def describe(moved: set[str]) -> tuple[str, str]:
    """Name the tensors that moved: those that predict, and those that the state keeps besides."""
    found = [noun for noun, starts in NOUNS.items() if any(f"{n}.".startswith(f"{s}.") for n in moved for s in starts)]
    if any(noun.startswith("all weights") for noun in found):
        found.remove("affine parameters")
    adapts = [noun for noun in found if noun.startswith(("affine parameters", "all weights", "statistics"))]
    return ", ".join(adapts) or "nothing", ", ".join(n for n in found if n not in adapts) or "nothing"


def megabytes(name: str, model: str, classes: int, dataset: str) -> str:
    """The size of a stream's state."""
    net = network(model, classes)
    cls = tribe.methods.get(name)
    method: Method = cls(**{"classes": classes, **cls.presets.get(dataset, {})})
    channels = tribe.models.architecture(model, classes=classes).channels
    method = studied(method, net, (channels, 28, 28) if channels == 1 else (channels, 32, 32))
    return in_words(size(method.init(net)))


def size(state: Any) -> int:
    """The bytes of a state."""
    return sum(t.numel() * t.element_size() for t in leaves(state).values())


def in_words(size: int) -> str:
    """A number of bytes, with a unit."""
    return f"{size} bytes" if size < 1000 else f"{size / 1e3:,.0f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


@functools.cache
def network(model: str, classes: int) -> tribe.Backbone:
    """One of the networks of the table."""
    return tribe.Backbone(tribe.models.create(model, classes=classes))


if __name__ == "__main__":
    sys.exit(main())
