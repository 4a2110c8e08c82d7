"""The parts that a page repeats: swatches, legends, tables, figures."""

import math
from collections.abc import Mapping, Sequence

from tribe.report.charts import marker
from tribe.report.markup import Child, Markup, tag
from tribe.report.scores import Score

Series = Mapping[str, int]  # label of a row -> number of its colour and marker


def swatch(series: int) -> Markup:
    """A method's colour, dash and marker, to stand beside its name."""
    sample = tag("path", class_="line", d="M1 7H25"), tag("use", href=f"#{marker(series)}", x=13, y=7)
    return tag("svg", sample, class_=f"swatch m{series}", viewBox="0 0 26 14", aria_hidden="true")


def legend(words: Mapping[str, str], series: Series) -> Markup:
    """The methods of a chart, and what is said of each."""
    items = [tag("li", swatch(series[label]), said, class_=f"m{series[label]}") for label, said in words.items()]
    return tag("ul", items, class_="legend")


def score_cell(found: Score, lowest: str | None, link: str | None = None, class_: str | None = None) -> Markup:
    """A number in a table: bold if it is the lowest, leading to its origin if there is a link."""
    shown: Child = tag("b", found.shown) if found.shown == lowest else found.shown
    shown = tag("a", shown, href=link) if link else shown
    spread = None if found.spread is None else tag("small", f" ± {found.spread:.2f}")
    order = None if math.isnan(found.mean) else f"{found.mean:.6f}"
    return tag("td", shown, spread, data_v=order, class_=class_)


def table(head: Sequence[str], rows: Sequence[Sequence[Child]], label: str) -> Markup:
    """Plain words and numbers; the first of each row names it."""
    top = tag("tr", [tag("th", name, scope="col") for name in head])
    body = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in rows]
    return scroller(tag("table", tag("thead", top), tag("tbody", body)), label)


def scroller(inside: Child, label: str) -> Markup:
    """What may be wider than the screen, reachable by keyboard."""
    return tag("div", inside, class_="scroll", tabindex=0, role="region", aria_label=label)


def figure(heading: str, words: str, *inside: Child) -> Markup:
    """A chart under its heading and what to see in it."""
    return tag("figure", tag("figcaption", tag("h3", heading), tag("p", words)), inside)


def numbers(inside: Markup) -> Markup:
    """A chart's numbers, folded away."""
    return tag("details", tag("summary", "As a table"), inside)


def many(count: int, one: str, more: str | None = None) -> str:
    """A number of things.

    >>> many(1, "class"), many(1200, "record")
    ('1 class', '1,200 records')
    """
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"
