"""The page: one HTML file that loads no other file, and that can be read without its script."""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files

from tribe._version import __version__
from tribe.experiments.report.charts import MARKERS
from tribe.experiments.report.collect import Group, Runs
from tribe.experiments.report.elements import Series, plural, score_cell, scroller, swatch
from tribe.experiments.report.markup import Child, Markup, tag
from tribe.experiments.report.scores import INSTANCE, SHORT, best, score
from tribe.experiments.report.sections import section

DASHES = ("none", "6 3", "2 2", "8 3 2 3")  # of the first eight methods, of the next eight, ...
ABOUT = {
    "Instance error": "The share of images that were misclassified.",
    "Category error": "The mean over domains of the mean over classes of the error; a class that is absent from a "
    "domain is skipped. Rare classes weigh as much as frequent ones.",
    "ECE": "Expected calibration error: the mean gap between confidence and accuracy, over 15 equal bins of "
    "confidence.",
    "ms per image": "The time to predict and adapt, divided by the images of a batch and by the streams that "
    "ran together. It depends on the machine, which the origin of each row names if it is known.",
    "±": "Standard deviation over seeds; each seed gives another stream.",
}

Entry = tuple[str, str, Group]  # anchor, title, group


def render(runs: Runs) -> str:
    """The whole page. The same results give the same text."""
    series = {label: i for i, label in enumerate(runs.labels)}
    titles, common = _titles(runs.groups)
    entries = [(f"g{i}", title, group) for i, (title, group) in enumerate(zip(titles, runs.groups, strict=True), 1)]
    style, script = _asset("page.css") + _colours(len(series)), _asset("page.js")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("title", "tribe report"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the numbers", href="#main", class_="skip"),
        _markers(),
        tag("aside", tag("div", _navigation(entries, runs), _switches(series), class_="held")),
        tag(
            "main",
            tag("h1", "What adapting changed"),
            tag("p", _lead(runs, common), class_="facts"),
            _warning(runs),
            _overview(entries, series) if entries else None,
            [section(group, name, title, series) for name, title, group in entries],
            _problems(runs),
            _about(),
            tag("footer", f"Written by tribe {__version__} from the results alone."),
            id="main",
            tabindex=-1,
        ),
        tag("script", Markup(script)),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _titles(groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    """The title of each group, without the facts that all groups share, and these facts."""
    counts = Counter(fact for group in groups for fact in dict.fromkeys(group.facts))
    common = [fact for fact, count in counts.items() if count == len(groups) > 1]
    return [", ".join(f for f in group.facts if f not in common) or group.title for group in groups], common


def _lead(runs: Runs, common: Sequence[str]) -> str:
    """The number of results, methods and streams, and which methods have the lowest error."""
    results = sum(len(row.played) for group in runs.groups for row in group.rows)
    streams = plural(len(runs.groups), "kind of stream", "kinds of stream")
    text = f"{plural(results, 'result')}, {plural(len(runs.labels), 'method')}, {streams}"
    text += f", all of {', '.join(common)}." if common else "."
    wins: Counter[str] = Counter()
    for group in runs.groups:
        scores = {row.label: score(row, INSTANCE) for row in group.rows}
        lowest = best(list(scores.values()))
        wins.update(label for label, found in scores.items() if found.text == lowest)
    if wins:
        most = ", ".join(f"{label} on {n}" for label, n in sorted(wins.items(), key=lambda win: (-win[1], win[0])))
        text += f" Lowest instance error: {most} of {len(runs.groups):,}."
    return text


def _navigation(entries: Sequence[Entry], runs: Runs) -> Markup:
    links = [("overview", "Overview")] if entries else []
    links += [(name, title) for name, title, _ in entries]
    links += [("problems", "Files with problems")] if runs.damaged or runs.repeated else []
    links += [("about", "About the numbers")]
    items = [tag("li", tag("a", title, href=f"#{name}")) for name, title in links]
    return tag("nav", tag("strong", "On this page"), tag("ol", items), aria_label="On this page")


def _switches(series: Series) -> Markup | None:
    """Checkboxes that show and hide methods in the charts; they work without a script."""
    boxes = [
        tag("label", tag("input", type="checkbox", id=f"show{i}", checked=True), swatch(i), label)
        for label, i in series.items()
    ]
    return tag("fieldset", tag("legend", "Methods in the charts"), boxes) if boxes else None


def _warning(runs: Runs) -> Markup | None:
    """One line at the top that counts the files with problems."""
    counts = {"damaged, left out": len(runs.damaged), "repeated, counted once": len(runs.repeated)}
    text = "; ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return tag("p", "Files: ", text, ". ", tag("a", "See which", href="#problems"), class_="warning") if text else None


def _problems(runs: Runs) -> Markup | None:
    if not runs.damaged and not runs.repeated:
        return None
    damaged = [tag("li", tag("code", path), f": {reason}") for path, reason in runs.damaged]
    repeated = [tag("li", tag("code", path), f" {reason}") for path, reason in runs.repeated]
    parts: list[Child] = [tag("h2", "Files with problems", id="problems")]
    if damaged:
        parts += [tag("p", "Damaged or not readable, so left out of all numbers:"), tag("ul", damaged)]
    if repeated:
        parts += [tag("p", "Repeated, so counted once:"), tag("ul", repeated)]
    return tag("section", parts, aria_labelledby="problems")


def _overview(entries: Sequence[Entry], series: Series) -> Markup:
    """A table with a row for each method and columns for each group."""
    above: list[Markup] = []
    below: list[Markup] = []
    cells: dict[str, list[Child]] = {label: [] for label in series}
    for name, title, group in entries:
        above.append(tag("th", tag("a", title, href=f"#{name}"), class_="group", colspan=len(SHORT), scope="colgroup"))
        links = {row.label: f"#{name}m{i}" for i, row in enumerate(group.rows)}
        for column in SHORT:
            first = "first" if column is SHORT[0] else None
            below.append(tag("th", column.short, scope="col", data_col=1 + len(below), class_=first))
            scores = {row.label: score(row, column) for row in group.rows}
            lowest = best(list(scores.values()))
            for label, row in cells.items():
                link = links.get(label) if first else None
                empty = tag("td", class_=first)
                row.append(score_cell(scores[label], lowest, link, first) if label in scores else empty)
    method = [tag("th", swatch(i), label, scope="row", data_v=label) for label, i in series.items()]
    body = [tag("tr", label, row) for label, row in zip(method, cells.values(), strict=True)]
    head = tag("tr", tag("td"), above), tag("tr", tag("th", "method", scope="col", data_col=0), below)
    note = "Instance and category error in %, mean ± standard deviation over seeds, and milliseconds per image. Lower "
    note += "is better, the lowest is bold. Each instance error links to the command and the spec that made it."
    whole = tag("table", tag("thead", head), tag("tbody", body), class_="sortable overview")
    return tag(
        "section",
        tag("h2", "Overview", id="overview"),
        tag("p", note, class_="note"),
        scroller(whole, "Overview"),
        aria_labelledby="overview",
    )


def _about() -> Markup:
    terms = [(tag("dt", name), tag("dd", text)) for name, text in ABOUT.items()]
    return tag("section", tag("h2", "About the numbers", id="about"), tag("dl", terms), aria_labelledby="about")


# -- style and script -------------------------------------------------------------------------------------------


def _asset(name: str) -> str:
    return files("tribe.experiments.report").joinpath(name).read_text(encoding="utf-8")


def _markers() -> Markup:
    shapes = [tag("path", id=f"k{i}", d=shape) for i, shape in enumerate(MARKERS)]
    return tag("svg", tag("defs", shapes), class_="marks", aria_hidden="true")


def _colours(count: int) -> str:
    """CSS rules: a colour and a dash for each method, and one that hides it if its checkbox is off."""
    rules = []
    for i in range(count):
        colour, dash = i % len(MARKERS), DASHES[i // len(MARKERS) % len(DASHES)]
        rules.append(f".m{i} {{ --c: var(--c{colour}); }} .m{i} .line {{ stroke-dasharray: {dash}; }}")
        off = f":root:has(#show{i}:not(:checked)) main"
        rules.append(f"{off} .chart .m{i}, {off} .legend .m{i}, {off} .matrix.m{i} {{ display: none; }}")
    levels = range(1, 11)
    rules += [f".t{n} {{ background: rgb(var(--tint) / {0.045 * n:.3f}); }}" for n in levels]
    rules += [f".f{n} {{ fill: rgb(var(--tint) / {0.1 * n:.1f}); }}" for n in levels]
    return "\n".join(rules) + "\n"


def _policy(style: str, script: str) -> str:
    """The content security policy: the page loads nothing, and only this style and this script are used."""
    return (
        f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; style-src {_hash(style)}; "
        f"script-src {_hash(script)}"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
