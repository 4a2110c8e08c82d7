"""Elements that the page uses in several places: swatches, legends, tables, figures."""

import math
from collections.abc import Mapping, Sequence

from tribe.experiments.report.charts import marker
from tribe.experiments.report.markup import Child, Markup, tag
from tribe.experiments.report.scores import Score

Series = Mapping[str, int]  # label of a row -> number of its colour and marker


def swatch(series: int) -> Markup:
    """A sample of a method's line, colour and marker."""
    sample = tag("path", class_="line", d="M1 7H25"), tag("use", href=f"#{marker(series)}", x=13, y=7)
    return tag("svg", sample, class_=f"swatch m{series}", viewBox="0 0 26 14", aria_hidden="true")


def legend(texts: Mapping[str, str], series: Series) -> Markup:
    """The methods of a chart, with a text for each."""
    items = [tag("li", swatch(series[label]), text, class_=f"m{series[label]}") for label, text in texts.items()]
    return tag("ul", items, class_="legend")


def score_cell(score: Score, lowest: str | None, link: str | None = None, class_: str | None = None) -> Markup:
    """A number in a table: bold if it is the lowest, with a link to its origin if there is one."""
    shown: Child = tag("b", score.text) if score.text == lowest else score.text
    shown = tag("a", shown, href=link) if link else shown
    spread = None if score.spread is None else tag("small", f" ± {score.spread:.2f}")
    order = None if math.isnan(score.mean) else f"{score.mean:.6f}"
    return tag("td", shown, spread, data_v=order, class_=class_)


def table(head: Sequence[str], rows: Sequence[Sequence[Child]], label: str) -> Markup:
    """A table; the first cell of each row is its header."""
    top = tag("tr", [tag("th", name, scope="col") for name in head])
    body = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in rows]
    return scroller(tag("table", tag("thead", top), tag("tbody", body)), label)


def scroller(inside: Child, label: str) -> Markup:
    """A region that scrolls if it is wider than the screen, also with the keyboard."""
    return tag("div", inside, class_="scroll", tabindex=0, role="region", aria_label=label)


def figure(heading: str, caption: str, *inside: Child) -> Markup:
    """A chart with its heading and caption."""
    return tag("figure", tag("figcaption", tag("h3", heading), tag("p", caption)), inside)


def folded_table(inside: Markup) -> Markup:
    """The numbers of a chart, in a closed details element."""
    return tag("details", tag("summary", "As a table"), inside)


def plural(count: int, one: str, more: str | None = None) -> str:
    """A number with its noun.

    >>> plural(1, "class"), plural(1200, "record")
    ('1 class', '1,200 records')
    """
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"
