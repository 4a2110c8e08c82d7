"""Pictures of all corruptions and scenarios, drawn by the library while the site is built; none is committed."""

import functools
import html
import inspect
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tribe import corruptions, datasets, scenarios
from tribe.experiments.plots import COLOURS
from website import charts
from website.scene import landscape

# Size, and where it is published, of the pictures of a family; the parameters depend on the size.
SIZES = {"large": (224, "common"), "small": (32, "common"), "digits": (28, "mnist")}
IMAGES = 400  # of each domain in the drawings of scenarios
DOMAINS = ("motion_blur", "fog", "stripe")
INKS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
FEWER = {"recurring": {"rounds": 3}}  # else the drawing is too long to see anything


def pictures() -> dict[str, bytes]:
    """All pictures, by their place on the site."""
    return {**{name: picture for kind in SIZES for name, picture in corrupted(kind).items()}, **streams()}


def markdown(name: str) -> str:
    """The Markdown of a gallery: scenarios, or a kind of corrupted pictures."""
    return scenario_gallery() if name == "scenarios" else corruption_gallery(name)


# -- corruptions -------------------------------------------------------------------------------------------------------


@functools.cache
def originals(kind: str) -> Tensor:
    """The clean pictures of a kind: one, or a few digits of MNIST."""
    if kind == "large":
        return landscape()[None]
    if kind == "small":
        return torch.nn.functional.avg_pool2d(landscape()[None], 7)
    digits = datasets.create("mnist")
    labels = digits.labels("clean")
    return digits.images("clean", torch.stack([(labels == k).nonzero()[0, 0] for k in range(1, 6)]))


def corrupted(kind: str) -> dict[str, bytes]:
    """The pictures of every corruption at every severity. MNIST-C has a single one: there five digits are shown."""
    clean, family = originals(kind), SIZES[kind][1]
    found = {f"gallery/{kind}/clean-{i}": x for i, x in enumerate(clean)}
    for name in corruptions.names(family):
        if len(clean) == 1:
            shown = [corruptions.apply(clean, name, severity, family=family)[0] for severity in corruptions.SEVERITIES]
        else:
            shown = list(corruptions.apply(clean, name, 5, family=family))
        found |= {f"gallery/{kind}/{name}-{i}": x for i, x in enumerate(shown, 1)}
    return {f"{place}{ending(kind)}": encode(x, kind) for place, x in found.items()}


def ending(kind: str) -> str:
    """Large pictures are JPEG, which is a tenth of the size; small ones keep every pixel."""
    return ".jpg" if kind == "large" else ".png"


def encode(x: Tensor, kind: str) -> bytes:
    """An image (C, H, W) as a file."""
    from PIL import Image

    pixels = (255 * x).round().byte().permute(1, 2, 0).squeeze(2).numpy()
    buffer = io.BytesIO()
    if kind == "large":
        Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    else:
        Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def corruption_gallery(kind: str) -> str:
    """A heading, a sentence and a row of pictures for each corruption."""
    size, family = SIZES[kind]
    parts = []
    for name in corruptions.names(family):
        about = (inspect.getdoc(corruptions.function(name, family)) or "").partition("\n")[0]
        if kind == "digits":
            files, labels = [f"{name}-{i}" for i in range(1, 6)], [""] * 5
            alts = [f"the digit {i} under {name}" for i in range(1, 6)]
        else:
            severities = list(corruptions.SEVERITIES)
            files, labels = ["clean-0", *(f"{name}-{s}" for s in severities)], ["clean", *map(str, severities)]
            alts = ["the clean picture", *(f"{name} at severity {s}, {size} pixels" for s in severities)]
        row = figures([f"gallery/{kind}/{file}{ending(kind)}" for file in files], labels, alts, size, kind)
        parts += [f"### {name} {{ #{kind}-{name} }}", *([] if kind == "small" else [about]), row]
    return "\n\n".join(parts)


def figures(places: Sequence[str], labels: Sequence[str], alts: Sequence[str], size: int, kind: str) -> str:
    """A row of pictures in HTML, which wraps on a narrow screen."""
    items = []
    for place, label, alt in zip(places, labels, alts, strict=True):
        image = f'<img src="{place}" alt="{html.escape(alt)}" width="{size}" height="{size}" loading="lazy">'
        items.append(f"<figure>{image}{f'<figcaption>{label}</figcaption>' if label else ''}</figure>")
    return f'<div class="gallery {kind}">{"".join(items)}</div>'


# -- scenarios ---------------------------------------------------------------------------------------------------------


def streams() -> dict[str, bytes]:
    """A drawing of a stream of each scenario."""
    from matplotlib import rc_context

    made = {}
    for name in scenarios.names():
        made[f"gallery/scenarios/{name}.png"] = draw_stream(name, COLOURS)
        with rc_context(
            {**dict.fromkeys(INKS, charts.INK), "figure.facecolor": charts.GROUND, "axes.facecolor": "none"}
        ):
            dark = draw_stream(name, [charts.DARK[colour.lower()] for colour in COLOURS])
        made[f"gallery/scenarios/{name}.dark.png"] = dark
    return made


def draw_stream(name: str, colours: Sequence[str]) -> bytes:
    """The class of every image of a stream in its order; colours are domains, lines are resets."""
    from matplotlib.figure import Figure

    black, *others = colours
    scenario = scenarios.create(name, **FEWER.get(name, {}))
    severe = isinstance(getattr(scenario, "severities", None), tuple)
    scenario = scenario.on(DOMAINS if severe else tuple(f"{domain}@5" for domain in DOMAINS))
    labels = datasets.create("mnist").labels("clean")[:IMAGES]
    plan = scenario.schedule([labels] * len(DOMAINS), seed=0)
    played = scenarios.played_labels(plan, scenario.expand([labels] * len(DOMAINS)))
    names = scenario.domain_names
    figure = Figure(figsize=(5, 2), layout="constrained")
    axes = figure.subplots()
    time = torch.arange(len(plan.index))
    for i, domain in enumerate(DOMAINS):
        mine = torch.tensor([names[d].startswith(domain) for d in plan.domain.tolist()])
        axes.plot(time[mine], played[mine], "|", color=others[i], markersize=5, markeredgewidth=0.7, label=domain)
    for start in plan.reset.nonzero().flatten().tolist():
        axes.axvline(start, color=black, linewidth=1)
    axes.set(
        xlabel="image of the stream", ylabel="class", yticks=range(0, 10, 3), xlim=(0, len(time)), ylim=(-0.7, 9.7)
    )
    if severe:
        severity = torch.tensor([int(names[d].partition("@")[2]) for d in plan.domain.tolist()])
        beside = axes.twinx()
        beside.plot(time, severity, color=black, linewidth=0.8)
        beside.set(ylabel="severity", ylim=(0, 5.3), yticks=range(1, 6))
    return _png(figure)


def scenario_gallery() -> str:
    """A heading, a sentence, a drawing and the fields of each scenario."""
    parts = []
    for name in scenarios.names():
        cls: Any = scenarios.get(name)
        about, paper = (inspect.getdoc(cls) or "").partition("\n")[0], getattr(cls, "paper", None)
        alt, place = f"The classes of a stream of {name}", f"gallery/scenarios/{name}"
        files = f"{place}.png#only-light", f"{place}.dark.png#only-dark"
        image = "".join(f"![{alt}]({file}){{ loading=lazy .stream }}" for file in files)
        parts += [f"### {name}", about, image, *([f"*{paper}*"] if paper else [])]
    return "\n\n".join(parts)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()
