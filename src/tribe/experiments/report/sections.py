"""The section of a group of runs: its numbers, its charts, and the origin of each number.

Numbers and charts that need labels are left out if there are none.
"""

import json
from collections.abc import Mapping
from typing import Any

from tribe.experiments.report import classes, curves, estimates
from tribe.experiments.report.collect import Group, Played, Row
from tribe.experiments.report.command import command
from tribe.experiments.report.elements import Series, plural, score_cell, scroller, swatch, table
from tribe.experiments.report.markup import Child, Markup, tag
from tribe.experiments.report.scores import LONG, best, score


def section(group: Group, name: str, title: str, series: Series) -> Markup:
    """The section of a group; ``name`` is its anchor."""
    labelled, judged = ([row for row in group.rows if row.labelled], [row for row in group.rows if row.judged])
    recorded = [row for row in group.rows if row.records]
    charts: list[Child] = []
    if labelled:
        charts += [curves.per_domain(group, labelled, series), curves.cost(labelled, series)]
    if judged:
        charts[1:1] = [curves.over_time(judged, series), curves.calibration(judged, series)]
    if watched := [row for row in judged if row.watched]:
        charts.append(estimates.over_time(watched, series))
    class_charts = [
        classes.played(labelled) if labelled else None,
        classes.predicted(recorded, group.classes) if recorded else None,
    ]
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        tag("p", _facts(group), class_="facts"),
        _results(group, name, series),
        tag("div", charts, class_="figures") if labelled else tag("p", "No labels, so no errors.", class_="note"),
        _lacking(group),
        tag("div", class_charts, class_="figures"),
        classes.confusions(judged, series) if judged else None,
        tag("h3", "Where the numbers come from"),
        [_origin(row, f"{name}m{i}", series) for i, row in enumerate(group.rows)],
        id=name,
        aria_labelledby=f"{name}-title",
    )


def _lacking(group: Group) -> Markup | None:
    """The rows that are not in charts which need records."""
    names = [row.label for row in group.rows if len(row.records) < len(row.played)]
    text = "No records were kept of {}: the curves over time, calibration, predicted classes and confusions need them."
    return tag("p", text.format(", ".join(names)), class_="note") if names else None


def _facts(group: Group) -> str:
    images = [played.scores["images"] for row in group.rows for played in row.played]
    length = f"{min(images):,}" + (f" to {max(images):,}" if max(images) > min(images) else "")
    machines = sorted({str(p.machine["device"]) for row in group.rows for p in row.played if p.machine.get("device")})
    size = f"{plural(len(group.domains), 'domain')}, {plural(group.classes, 'class', 'classes')}"
    on = f", on {' and '.join(machines)}" if machines else ""
    return f"{group.title}: streams of {length} images, {size}{on}."


def _results(group: Group, name: str, series: Series) -> Markup:
    """The numbers of every row."""
    columns = [[score(row, column) for row in group.rows] for column in LONG]
    lowest = [best(scores) if column.best else None for column, scores in zip(LONG, columns, strict=True)]
    body = []
    for i, row in enumerate(group.rows):
        links = [f"#{name}m{i}", *[None] * (len(LONG) - 1)]
        cells = [score_cell(c[i], low, link) for c, low, link in zip(columns, lowest, links, strict=True)]
        seeds = tag("td", len(row.played), data_v=len(row.played))
        label = tag("th", swatch(series[row.label]), row.label, scope="row", data_v=row.label)
        body.append(tag("tr", label, cells, seeds))
    names = ("method", *(column.name for column in LONG), "seeds")
    head = tag("tr", [tag("th", column, scope="col", data_col=i) for i, column in enumerate(names)])
    return scroller(tag("table", tag("thead", head), tag("tbody", body), class_="sortable"), f"Results, {group.title}")


def _origin(row: Row, name: str, series: Series) -> Markup:
    """The origin of a row: command, records with their numbers, machine, spec."""
    spec = {key: value for key, value in row.played[0].spec.items() if key not in ("seed", "experiment")}
    seeds = [played.seed for played in row.played if isinstance(played.seed, int)]
    rerun = command(spec, seeds, row.played[0].code.get("files"))
    head = ["record", "seed", "images", *(column.name for column in LONG)]
    inside = tag(
        "div",
        [tag("pre", tag("code", line), class_="command") for line in rerun.lines],
        [tag("p", note, class_="note") for note in rerun.notes],
        table(head, [_record_cells(played) for played in row.played], f"Records of {row.label}"),
        [
            tag("p", f"Made on {machine}.", class_="note")
            for machine in sorted({_describe(p.machine) for p in row.played})
            if machine
        ],
        tag("p", "The spec of these records, without the seed:", class_="note"),
        tag("pre", tag("code", _json(spec))),
        id=name,
    )
    return tag("details", tag("summary", swatch(series[row.label]), row.label), inside, class_="origin")


def _record_cells(played: Played) -> list[str]:
    alone = Row("", (played,))
    return [
        played.path,
        str(played.seed),
        f"{played.scores['images']:,}",
        *(score(alone, c).text_with_spread for c in LONG),
    ]


def _describe(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items() if value is not None)


def _json(value: Any, indent: str = "") -> str:
    """JSON with one line for each field; a list is on one line.

    >>> print(_json({"a": [1, 2], "b": {"c": None}}))
    {
      "a": [1, 2],
      "b": {
        "c": null
      }
    }
    """
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value, ensure_ascii=False)
    deeper = f"{indent}  "
    fields = [f"{deeper}{json.dumps(key, ensure_ascii=False)}: {_json(field, deeper)}" for key, field in value.items()]
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}"
