"""Draw the pictures of the pages How it works and Start, from real streams: ``python -m studies.pictures [NAME ...]``.

They are committed, because the repository shows the pages, too. All use the digits and the network of the package.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import tribe
from studies.deploy.streams import record
from tribe.core.rules import Frozen, PerBatch
from tribe.experiments.plots import COLOURS, save
from tribe.experiments.plots import errors as errors_chart
from tribe.norms.balanced import Balanced
from tribe.norms.batch import Robust

FOLDER = Path(__file__).parents[1] / "docs/pictures"
BLACK, BLUE, ORANGE, GREEN = COLOURS[:4]


def network() -> tribe.Backbone:
    """The network that comes with the package."""
    return tribe.Backbone(tribe.models.load("compact", tribe.models.find("compact", "mnist")))


def bursty_stream(*corruptions: str, imbalance: float = 100) -> tribe.Stream:
    """Digits under some corruptions, in the paper's order."""
    chosen = {"corruptions": corruptions} if corruptions else {}
    data = tribe.datasets.create("live-mnist-c", **chosen)
    return tribe.Stream(data, tribe.scenarios.create("gli-f", imbalance=imbalance), seeds=(0,))


# -- a day of a camera -------------------------------------------------------------------------------------------------


PARTS = ("clean", "night", "rain", "clean", "lens", "night", "clean")
SHOWN = {"clean": "day", "lens": "other lens"}
EACH = 1000  # images of a part
LAST = 200  # images of an error


def day() -> Figure:
    """The errors of the source, of TRIBE, and of the prepared network on a camera whose world changes."""
    net, digits = network(), tribe.datasets.create("mnist")
    labels = digits.labels("clean")
    images = digits.images("clean", torch.arange(len(labels)))
    prepared = tribe.prepare(net, images[:EACH], labels[:EACH])
    stream = record(images[EACH:], labels[EACH:], PARTS, EACH, bursts=True, seed=11)
    models = {
        "the network as it was trained": tribe.adapt(net, "source"),
        "TRIBE, the paper's method": tribe.adapt(net, "tribe"),
        'tribe.adapt(net, "net.tribe")': tribe.adapt(net, prepared),
    }
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    above, axes = figure.subplots(2, 1, height_ratios=(1, 5))
    above.axis("off")
    for (name, model), colour in zip(models.items(), (BLACK, BLUE, GREEN), strict=True):
        wrong = torch.cat(
            [
                (model(x.float() / 255).argmax(-1) != y).float()
                for x, y in zip(stream.images.split(64), stream.labels.split(64), strict=True)
            ]
        )
        recent = 100 * wrong.unfold(0, LAST, LAST // 8).mean(1)
        label = f"{name}: {100 * wrong.mean():.1f} % over all"
        axes.plot(LAST + LAST // 8 * torch.arange(len(recent)), recent, color=colour, label=label, linewidth=1.6)
    for place, part in enumerate(PARTS):
        axes.axvline(place * EACH, color="#999999", linewidth=0.6)
        above.text((place + 0.5) / len(PARTS), 0.0, SHOWN.get(part, part), ha="center", transform=above.transAxes)
        row = torch.cat(tuple(stream.images[stream.part == place][[100, 400, 700], 0]), 1)
        inset = above.inset_axes((place / len(PARTS) + 0.01, 0.35, 1 / len(PARTS) - 0.02, 0.65))
        inset.imshow(row, cmap="gray", vmin=0, vmax=255)
        inset.axis("off")
    axes.set(ylabel=f"error of the last {LAST} images, %", xlabel="image of the stream", ylim=(0, 100))
    axes.set_xlim(0, EACH * len(PARTS))
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small")
    return figure


# -- the main job ------------------------------------------------------------------------------------------------------


def errors() -> Figure:
    """The errors of `make run`, corruption by corruption."""
    net, stream = network(), bursty_stream()
    names = "source", "bn", "tent", "note", "rotta", "tribe"
    methods: dict[str, Any] = {name: tribe.methods.get(name).preset("mnist") for name in names}
    methods["bank+guard+time-checked"] = tribe.methods.create("bank+guard+time-checked", classes=10)
    return errors_chart({name: tribe.run(net, method, stream) for name, method in methods.items()})


# -- Balanced BN -------------------------------------------------------------------------------------------------------


RULES: dict[str, Any] = {
    "source: the statistics of training": Frozen(),
    "BN: the batch alone": PerBatch(),
    "Robust BN: a moving average": Robust(0.05),
    "Balanced BN: one of each class, pooled evenly": Balanced(10, eta=0.01),
}
BLURRED = ("motion_blur", "canny_edges")


def normalisation() -> Figure:
    """The errors of norm rules alone, while nothing learns, over a stream in bursts."""
    net, stream = network(), bursty_stream(*BLURRED)
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2), sharex=True)
    for (name, rule), colour in zip(RULES.items(), (BLACK, ORANGE, BLUE, GREEN), strict=True):
        wrong = torch.cat([(logits[0].argmax(-1) != y[0]).float() for logits, y, _ in normalised(net, rule, stream)])
        recent = 100 * wrong.unfold(0, 256, 64).mean(1)
        label = f"{name}: {100 * wrong.mean():.1f} %"
        above.plot(256 + 64 * torch.arange(len(recent)), recent, color=colour, label=label, linewidth=1.4)
    above.set(ylabel="error of the last 256, %", ylim=(0, 100))
    above.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper center", fontsize="small", ncols=2)
    labels = torch.cat([batch.y[0] for batch in stream])
    below.plot(labels.numpy(), "|", color=BLACK, markersize=5, markeredgewidth=0.6, rasterized=True)
    below.set(xlabel="image of the stream", ylabel="class", yticks=range(0, 10, 3), xlim=(0, len(labels)))
    return figure


def normalised(net: tribe.Backbone, rule: Any, stream: tribe.Stream) -> Iterator[tuple[Tensor, Tensor, tribe.Stats]]:
    """The logits of each batch, its labels and the statistics after it; pseudo labels are the predictions before it."""
    affine, stats = net.source(classes=rule.classes)
    for batch in stream:
        labels = net(batch.x, affine, stats, rule).logits.argmax(-1) if rule.classes > 1 else None
        logits, _, stats = net(batch.x, affine, stats, rule, labels)
        yield logits, batch.y, stats


def class_means() -> Figure:
    """The means of two channels that Balanced BN keeps for each class, and two ways of pooling them."""
    net, stream = network(), bursty_stream("canny_edges")
    *_, (_, _, stats) = normalised(net, Balanced(10, eta=0.01), stream)
    counts = torch.bincount(torch.cat([batch.y[0] for batch in stream]), minlength=10).float()
    between = stats.mean[0].var(0) / stats.var[0].mean(0)
    first, second = between.topk(2).indices.tolist()
    points = stats.mean[0][:, [first, second]]  # (10, 2)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*points.T, s=20 + counts / 2, color=BLACK, alpha=0.15, linewidth=0)
    for digit, (x, y) in enumerate(points.tolist()):
        axes.text(x, y, str(digit), ha="center", va="center", fontsize=10)
    weighted = (counts[:, None] * points).sum(0) / counts.sum()
    axes.plot(*weighted, "D", color=BLUE, label="pooled by frequency: frequent classes decide")
    axes.plot(*points.mean(0), "s", color=GREEN, label="pooled evenly: every class counts the same (Eq. 2)")
    axes.set(xlabel="mean of one channel", ylabel="mean of another")
    axes.legend(fontsize="small")
    axes.margins(0.12)
    return figure


# -- the tri-net -------------------------------------------------------------------------------------------------------


def trinet() -> Figure:
    """The three branches, what they see and which losses join them."""
    figure = Figure(figsize=(4.8, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(0.4, 5.6))
    axes.axis("off")
    box(axes, 0.7, 3.0, "images", BLACK)
    box(axes, 3.9, 5.0, "student\nsees augmented images", ORANGE)
    box(axes, 3.9, 3.0, "teacher\npredicts and labels", BLUE)
    box(axes, 3.9, 1.0, "anchor\nsource's parameters", GREEN)
    for height in (4.8, 3.0, 1.2):
        arrow(axes, (1.3, 3.0), (2.35, height), BLACK)
    arrow(axes, (5.35, 3.0), (7.2, 3.0), BLUE)
    arrow(axes, (5.35, 3.3), (7.1, 4.55), BLUE)
    arrow(axes, (5.35, 2.7), (7.1, 1.3), BLUE)
    arrow(axes, (5.45, 1.0), (7.2, 1.0), GREEN)
    arrow(axes, (5.45, 5.0), (7.2, 5.0), ORANGE)
    axes.text(7.3, 5.0, "self-training loss,\ncertain labels only\n(Eq. 5)", va="center", fontsize=8)
    axes.text(7.3, 3.0, "prediction", va="center", fontsize=8, weight="bold")
    axes.text(7.3, 1.0, "anchored loss\n(Eq. 6)", va="center", fontsize=8)
    both = {"arrowstyle": "<->", "color": BLACK, "linestyle": "dashed"}
    axes.annotate("", (3.9, 4.5), (3.9, 3.5), arrowprops=both)
    axes.text(4.0, 4.0, "same parameters", va="center", fontsize=7)
    return figure


def box(axes: Any, x: float, y: float, text: str, colour: str) -> None:
    """A text in a box."""
    style = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": colour, "linewidth": 1.8}
    axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=style, zorder=3)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """An arrow between two points."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.3})


def anchor() -> Figure:
    """How far a network moves away from its source with the anchor and without it, and its error."""
    net, stream = network(), bursty_stream()
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for weight, name, colour in ((0.5, "with the anchor", GREEN), (0.0, "without it", ORANGE)):
        wrong, distance = followed(net, tribe.methods.get("tribe").preset("mnist", lambda_anc=weight), stream)
        error = 100 * wrong.float().unfold(0, 2000, 500).mean(1)
        label = f"{name}: {100 * wrong.float().mean():.1f} %"
        above.plot(2000 + 500 * torch.arange(len(error)), error, color=colour, label=label)
        below.plot(64 * torch.arange(len(distance)), distance, color=colour)
    above.set(ylabel="error of the last 2,000, %", ylim=(0, None))
    above.legend(title="error of the whole stream", fontsize="small")
    below.set(xlabel="image of the stream", ylabel="distance from the source", ylim=(0, None), xlim=(0, None))
    for axes in (above, below):
        axes.grid(axis="y", alpha=0.3)
    return figure


def followed(net: tribe.Backbone, method: Any, stream: tribe.Stream) -> tuple[Tensor, Tensor]:
    """Whether each image was wrong, and after each batch the distance of the parameters from the source's."""
    state, wrong, distance = method.init(net), [], []
    for batch in stream:
        logits, state = method.step(net, state, batch.x, batch.valid)
        wrong.append(logits[0].argmax(-1) != batch.y[0])
        distance.append(state.info.distance.clone())
    return torch.cat(wrong), torch.cat(distance)


PICTURES: dict[str, Callable[[], Figure]] = {
    "day": day,
    "errors": errors,
    "normalisation": normalisation,
    "class-means": class_means,
    "trinet": trinet,
    "anchor": anchor,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or PICTURES:
        save(PICTURES[chosen](), FOLDER / f"{chosen}.svg")
        print(FOLDER / f"{chosen}.svg")
