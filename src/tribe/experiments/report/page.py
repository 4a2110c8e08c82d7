"""The page: one HTML file that loads no other file, and that can be read without its script."""

import base64
import hashlib
import json
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe._version import __version__
from tribe.experiments.report import figures
from tribe.experiments.report.groups import (
    INSTANCE,
    LONG,
    REAL_TIME,
    SHORT,
    MethodRow,
    PlayedStream,
    ResultGroup,
    Runs,
    best,
    mean_text,
)
from tribe.fields import printable
from tribe.methods.bridged import PREFIX, UNCHECKED

MOST_COLUMNS = 20  # of a table of classes; more classes become a map
MOST_OPEN = 6  # groups; more are folded, and a reader opens those of interest
MOST_FREQUENT = 6  # methods with a column of their own in an overview by streams


class ClockTable(NamedTuple):
    """The errors of methods on one stream in real time, at each speed."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class ClassMap(NamedTuple):
    """A map of classes: a table of tinted numbers, or a picture if there are too many classes."""

    title: str
    caption: str
    names: Sequence[str]
    texts: Sequence[Sequence[str]]
    tints: Sequence[Sequence[int]]  # from 0 to 10
    picture: Any = None
    square: bool = False


def render(runs: Runs) -> str:
    """Return the whole page. The same results give the same text."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a report needs jinja2: pip install 'tribe-tta[report]'", name=error.name) from error

    def finalize(value: Any) -> Any:
        """Make names in files safe to show; the template escapes them."""
        return printable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value

    series = {label: i for i, label in enumerate(runs.labels)}
    titles, common = _titles(runs.groups)
    groups = [_group(group, title, series) for title, group in zip(titles, runs.groups, strict=True)]
    script = _asset("page.js")
    counts = {"damaged, left out": len(runs.damaged), "repeated, counted once": len(runs.repeated)}
    template = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=finalize
    ).from_string(_asset("page.html.j2"))
    text: str = template.render(
        runs=runs,
        series=series,
        groups=groups,
        short=SHORT,
        long=LONG,
        mean_text=mean_text,
        clocks=_clock_tables(runs.groups),
        frequent=_frequent(runs),
        fold=len(groups) > MOST_OPEN,
        lead=_lead(runs, common),
        warning="; ".join(f"{count:,} {what}" for what, count in counts.items() if count),
        style=Markup(_asset("page.css")),
        script=Markup(script),
        policy=_policy(script),
        version=__version__,
    )
    return text.lstrip() + "\n"


def plural(count: int, one: str, more: str | None = None) -> str:
    """Return a number with its noun.

    >>> plural(1, "class"), plural(1200, "record")
    ('1 class', '1,200 records')
    """
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def _titles(groups: Sequence[ResultGroup]) -> tuple[list[str], list[str]]:
    """Return the title of each group, without the facts that all groups share, and these facts."""
    counts = Counter(fact for group in groups for fact in dict.fromkeys(group.facts))
    common = [fact for fact, count in counts.items() if count == len(groups) > 1]
    return [", ".join(f for f in group.facts if f not in common) or group.title for group in groups], common


def _lead(runs: Runs, common: Sequence[str]) -> str:
    """Return the number of results, methods and streams, and which methods have the lowest error."""
    results = sum(len(row.played) for group in runs.groups for row in group.rows)
    streams = plural(len(runs.groups), "kind of stream", "kinds of stream")
    text = f"{plural(results, 'result')}, {plural(len(runs.labels), 'method')}, {streams}"
    text += f", all of {', '.join(common)}." if common else "."
    wins: Counter[str] = Counter()
    for group in runs.groups:
        wins.update(_winners(group))
    if wins:
        most = ", ".join(f"{label} on {n}" for label, n in sorted(wins.items(), key=lambda win: (-win[1], win[0])))
        text += f" Lowest instance error: {most} of {len(runs.groups):,}."
    bridged = dict.fromkeys(label.partition(",")[0] for label in runs.labels if label.startswith(PREFIX))
    return text + f" {', '.join(bridged)}: {UNCHECKED}." * bool(bridged)


def _winners(group: ResultGroup) -> list[str]:
    """Return the methods with the lowest instance error; none if there are not two to compare."""
    scores = {row.label: mean_text(row.score(INSTANCE)) for row in group.rows}
    lowest = best([row.score(INSTANCE) for row in group.rows])
    return [label for label, text in scores.items() if text == lowest]


def _frequent(runs: Runs) -> list[str] | None:
    """Return the methods that most streams share; None unless a table of all methods would be mostly empty."""
    counts = Counter(row.label for group in runs.groups for row in group.rows)
    if len(runs.groups) <= MOST_OPEN or 2 * counts.total() >= len(runs.labels) * len(runs.groups):
        return None
    most = [label for label, count in counts.most_common(MOST_FREQUENT) if 2 * count >= len(runs.groups)]
    return [label for label in runs.labels if label in most]


def _clock_tables(groups: Sequence[ResultGroup]) -> list[ClockTable]:
    """Return a table for each stream that was played in real time: methods, their costs, and the error at each speed.

    The first column is the error where the stream waits, if it was played so, too. The lowest of a speed is bold.
    """
    from markupsafe import Markup

    streams: dict[str, dict[float, ResultGroup]] = defaultdict(dict)
    for group in groups:
        streams[group.stream][group.speed or 0] = group
    tables = []
    for speeds in (dict(sorted(found.items())) for found in streams.values() if any(found)):
        rows = [{row.label: row for row in group.rows} for group in speeds.values()]
        labels = dict.fromkeys(label for group in rows for label in group)
        head = ("method", "x inference", *(f"{speed:g} x" if speed else "waits" for speed in speeds))
        lowest, lines = [best([row.score(INSTANCE) for row in found.values()]) for found in rows], []
        for label in labels:
            costs = sorted(
                {f"{cost:g}" for row in rows if label in row and not math.isnan(cost := row[label].inferences)}
            )
            errors = [mean_text(row[label].score(INSTANCE)) if label in row else "" for row in rows]
            bold = (Markup("<b>%s</b>") % e if e == low else e for e, low in zip(errors, lowest, strict=True))
            lines.append((label, ", ".join(costs) or "–", *bold))
        group = speeds[max(speeds)]
        tables.append(
            ClockTable(", ".join(fact for fact in group.facts if not fact.startswith(REAL_TIME)), head, lines)
        )
    return tables


def _group(group: ResultGroup, title: str, series: Mapping[str, int]) -> dict[str, Any]:
    """Return what the template shows of a group."""
    return {
        "title": title,
        "facts": _facts(group),
        "rows": {row.label: row for row in group.rows},
        "winners": _winners(group),
        "lowest": {column: best([row.score(column) for row in group.rows]) for column in LONG if column.best},
        "charts": _charts(group, series),
        "maps": _maps(group),
        "confusions": [_confusion(group, row) for row in group.rows if row.judged],
        "without_records": [row.label for row in group.rows if len(row.records) < len(row.played)],
        "origins": [_origin(row) for row in group.rows],
    }


def _facts(group: ResultGroup) -> str:
    images = [played.scores["images"] for row in group.rows for played in row.played]
    length = f"{min(images):,}" + (f" to {max(images):,}" if max(images) > min(images) else "")
    machines = sorted({str(m["device"]) for row in group.rows for p in row.played if (m := _machine(p)).get("device")})
    size = f"{plural(len(group.domains), 'domain')}, {plural(group.classes, 'class', 'classes')}"
    on = f", on {' and '.join(machines)}" if machines else ""
    return f"{group.title}: streams of {length} images, {size}{on}."


def _charts(group: ResultGroup, series: Mapping[str, int]) -> list[Any]:
    labelled, judged = [row for row in group.rows if row.labelled], [row for row in group.rows if row.judged]
    watched = [row for row in judged if row.watched]
    charts = (
        (figures.domain_errors, labelled),
        (figures.error_over_time, judged),
        (figures.calibration, judged),
        (figures.cost, labelled),
        (figures.estimates, watched),
    )
    return [draw(group, rows, series) for draw, rows in charts if rows]


def _maps(group: ResultGroup) -> list[ClassMap]:
    """Return how often each class occurs in each domain, and how often each method predicts it."""
    maps = []
    if first := next((played for row in group.rows for played in row.labelled), None):
        counts = torch.tensor([first.scores["class_counts"][name] for name in first.domains])
        shares = counts.double().log1p() / counts.max().double().log1p()
        texts = [[f"{n:,}" if n else "·" for n in row] for row in counts.tolist()]
        caption = f"Images of each class in each domain, in the stream of seed {first.seed}. The tint is logarithmic."
        maps.append(_class_map(group, "Classes played", caption, first.domains, texts, shares))
    if recorded := [row for row in group.rows if row.records]:
        predictions = {row.label: [record.prediction for record in row.records] for row in recorded}
        labels = [record.label[record.label >= 0] for row in recorded[:1] for record in row.judged]
        given = ({"the labels": labels} if labels else {}) | predictions
        counts = torch.stack([torch.bincount(torch.cat(v), minlength=group.classes) for v in given.values()]).double()
        shares = counts / counts.sum(1, keepdim=True)
        caption = "Share of each class among the predictions in %, all seeds together. A method that collapses has few."
        texts = _percents(shares)
        maps.append(_class_map(group, "Classes predicted", caption, list(given), texts, shares / shares.max()))
    return maps


def _class_map(
    group: ResultGroup, title: str, caption: str, names: Sequence[str], texts: list[list[str]], shares: Tensor
) -> ClassMap:
    if shares.shape[1] <= MOST_COLUMNS:
        return ClassMap(title, caption, names, texts, _tints(shares))
    return ClassMap(title, caption, (), (), (), figures.class_map(group, title, shares, "", names))


def _confusion(group: ResultGroup, row: MethodRow) -> ClassMap:
    """Return the confusion matrix of a method; the title is its label."""
    classes = row.judged[0].classes
    pairs = torch.cat([(r.label * classes + r.prediction)[r.label >= 0] for r in row.judged])
    counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes)
    shares = counts.double() / counts.sum(1, keepdim=True)
    wrong = counts.clone().fill_diagonal_(0).flatten()
    top = sorted(wrong.nonzero().flatten().tolist(), key=lambda cell: (-int(wrong[cell]), cell))[:3]
    text = ", ".join(f"{cell // classes} as {cell % classes} ({int(wrong[cell]):,} images)" for cell in top)
    caption = f"most often predicts {text}" if text else "no confusions"
    if classes <= MOST_COLUMNS:
        names = [str(k) for k in range(classes)]
        return ClassMap(row.label, caption, names, _percents(shares), _tints(shares), square=True)
    picture = figures.class_map(group, f"Confusion of {row.label}", shares, "true class")
    return ClassMap(row.label, caption, (), (), (), picture)


def _percents(shares: Tensor) -> list[list[str]]:
    """Return whole per cents; a dot for 0, and an empty text for NaN."""
    return [["" if math.isnan(s) else f"{100 * s:.0f}" if s >= 0.005 else "·" for s in row] for row in shares.tolist()]


def _tints(shares: Tensor) -> list[list[int]]:
    tints: list[list[int]] = (10 * shares.nan_to_num(0)).round().clamp(0, 10).long().tolist()
    return tints


def _origin(row: MethodRow) -> dict[str, Any]:
    """Return the records, machines, commands and the spec of a row."""
    spec = {key: value for key, value in row.played[0].spec.items() if key not in ("seed", "experiment")}
    return {
        "label": row.label,
        "records": [
            [played.path, played.seed, f"{played.scores['images']:,}"]
            + [mean_text(MethodRow("", (played,)).score(column)) for column in LONG]
            for played in row.played
        ],
        "machines": sorted(
            {", ".join(f"{k} {v}" for k, v in _machine(p).items() if v is not None) for p in row.played} - {""}
        ),
        "commands": sorted({shlex.join(p.environment.get("command", ())) for p in row.played} - {""}),
        "spec": json.dumps(spec, indent=2, ensure_ascii=False),
    }


def _machine(played: PlayedStream) -> Mapping[str, Any]:
    machine: Mapping[str, Any] = played.environment.get("machine", {})
    return machine


def _asset(name: str) -> str:
    return files("tribe.experiments.report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return the content security policy: the page loads nothing, and only this script runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
