"""Charts of classes: how often each occurs, how often each is predicted, and which are confused."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tribe.experiments.report.charts import heat, tint
from tribe.experiments.report.collect import Row
from tribe.experiments.report.elements import Series, figure, folded_table, scroller, swatch, table
from tribe.experiments.report.markup import Markup, tag

MOST_COLUMNS = 20  # of a table of classes; more classes become a heat map
MOST_CELLS = 100  # columns of a heat map; with more classes, neighbours share a cell


def played(rows: Sequence[Row]) -> Markup:
    """The number of images of each class in each domain."""
    first = next(played for row in rows for played in row.labelled)
    domains = first.domains
    counts = torch.tensor([first.scores["class_counts"][name] for name in domains])
    shares = counts.double().log1p() / counts.max().double().log1p()
    texts = [[f"{n:,}" if n else "·" for n in row] for row in counts.tolist()]
    picture = _tinted("Classes played", domains, texts, shares)
    facts = [[name, *_summary(count)] for name, count in zip(domains, counts, strict=True)]
    plain = table(["domain", "images", "classes", "most of one", "fewest of one"], facts, "Images of each domain")
    caption = f"Images of each class in each domain, in the stream of seed {first.seed}. The tint is logarithmic."
    return figure("Classes played", caption, picture, folded_table(plain) if counts.shape[1] > MOST_COLUMNS else None)


def _summary(count: Tensor) -> list[str]:
    present = count[count > 0]
    if not len(present):
        return ["0", "0", "–", "–"]
    return [f"{n:,}" for n in (int(count.sum()), len(present), int(present.max()), int(present.min()))]


def predicted(rows: Sequence[Row], classes: int) -> Markup:
    """How often each method predicts each class; a method that collapses predicts few classes."""
    predictions = {row.label: [record.prediction for record in row.records] for row in rows}
    labels = [record.label[record.label >= 0] for row in rows[:1] for record in row.judged]
    found = ({"the labels": labels} if labels else {}) | predictions
    counts = [torch.bincount(torch.cat(values), minlength=classes).double() for values in found.values()]
    shares = torch.stack([count / count.sum() for count in counts])
    picture = _tinted("Classes predicted", list(found), _percents(shares), shares / shares.max())
    caption = "Share of each class among the predictions in %, all seeds together. A method that collapses has few."
    return figure("Classes predicted", caption, picture)


def confusions(rows: Sequence[Row], series: Series) -> Markup:
    """The confusion matrix of each method."""
    note = "Rows are true classes, columns predicted ones: share of the true class in %, all seeds together."
    matrices = [_confusion(row, series[row.label]) for row in rows]
    return tag("div", tag("h3", "Confusion"), tag("p", note, class_="note"), tag("div", matrices, class_="matrices"))


def _confusion(row: Row, number: int) -> Markup:
    classes = row.judged[0].classes
    pairs = torch.cat([(r.label * classes + r.prediction)[r.label >= 0] for r in row.judged])
    cell, count = pairs.unique(return_counts=True)
    true, predicted = cell // classes, cell % classes
    each = math.ceil(classes / MOST_CELLS)  # neighbouring classes that share a cell
    size = math.ceil(classes / each)
    grid = torch.zeros(size * size, dtype=torch.float64)
    grid = grid.index_add_(0, true // each * size + predicted // each, count.double()).view(size, size)
    shares = grid / grid.sum(1, keepdim=True)
    worst = _most_confused(true, predicted, count)
    text = ", ".join(f"{a} as {b} ({n:,} images)" for n, a, b in worst[:3])
    caption = tag("p", f"most often predicts {text}" if text else "no confusions")
    title, more = f"Confusion of {row.label}", None
    if size > MOST_COLUMNS:
        cells = f" ({each} a cell)" if each > 1 else ""
        picture = heat(title, text, shares.tolist(), f"predicted class{cells}", f"true class{cells}")
        top = [[f"{a} as {b}", f"{n:,}"] for n, a, b in worst]
        more = folded_table(table(["predicted", "images"], top, f"Most frequent confusions of {row.label}"))
    else:
        picture = _tinted(title, [str(k) for k in range(classes)], _percents(shares), shares, square=True)
    name = tag("strong", swatch(number), row.label)
    return tag("figure", tag("figcaption", name, caption), picture, more, class_=f"m{number} matrix")


def _most_confused(true: Tensor, predicted: Tensor, count: Tensor) -> list[tuple[int, int, int]]:
    """(images, true class, predicted class) of the ten most frequent confusions."""
    wrong = true != predicted
    confusions = zip(count[wrong].tolist(), true[wrong].tolist(), predicted[wrong].tolist(), strict=True)
    return sorted(confusions, key=lambda confusion: (-confusion[0], *confusion[1:]))[:10]


def _percents(shares: Tensor) -> list[list[str]]:
    """Whole per cents; a dot for 0, and an empty text for NaN."""
    return [["" if math.isnan(s) else f"{100 * s:.0f}" if s >= 0.005 else "·" for s in row] for row in shares.tolist()]


def _tinted(
    title: str, names: Sequence[str], texts: Sequence[Sequence[str]], shares: Tensor, square: bool = False
) -> Markup:
    """A table of numbers by class, tinted by ``shares``; a heat map if there are too many classes."""
    classes = shares.shape[1]
    if classes > MOST_COLUMNS:
        each = math.ceil(classes / MOST_CELLS)
        merged = torch.stack([part.amax(1) for part in shares.split(each, 1)], 1)
        across = f"class ({each} a cell)" if each > 1 else "class"
        row_names = names if len(names) <= MOST_COLUMNS else ()
        return heat(title, f"From the top: {', '.join(names)}", merged.tolist(), across, "domain", row_names)
    head = tag("tr", tag("td"), [tag("th", k, scope="col") for k in range(classes)])
    body = []
    for i, (name, line, row) in enumerate(zip(names, texts, shares.tolist(), strict=True)):
        kinds = [f"t{tint(share)}" + (" own" if square and i == j else "") for j, share in enumerate(row)]
        cells = [tag("td", text, class_=kind) for text, kind in zip(line, kinds, strict=True)]
        body.append(tag("tr", tag("th", name, scope="row"), cells))
    whole = tag("table", tag("thead", head), tag("tbody", body), class_="tinted square" if square else "tinted")
    return tag("div", whole, role="group", aria_label=title) if square else scroller(whole, title)
