"""Charts as SVG: lines, points and heat maps.

Each series has a CSS class (``m0``, ``m1``, ...), whose colour the page sets for a light or a dark background, and a
marker (``#k0``, ``#k1``, ...), which the page defines once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tribe.experiments.report.markup import Child, Markup, number, tag

WIDTH, HEIGHT = 440.0, 270.0
LEFT, RIGHT, TOP = 46.0, 20.0, 12.0
LETTER = 7.0  # approximate width of a letter at the size of a phone
LONGEST = 18  # letters of a label
HORIZONTAL = 7  # letters of the longest label that is not tilted
MARKERS = (
    *("M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z", "M-3.2-3.2h6.4v6.4h-6.4z", "M0-4.6L4.6 0L0 4.6L-4.6 0z"),
    *("M0-4.4L4.2 3.2H-4.2z", "M0 4.4L4.2-3.2H-4.2z", "M-4.4 0L3.2-4.2V4.2z", "M4.4 0L-3.2-4.2V4.2z"),
    "M-4.2-1.3h2.9v-2.9h2.6v2.9h2.9v2.6h-2.9v2.9h-2.6v-2.9h-2.9z",
)


class Axis(NamedTuple):
    """A range of values and its ticks."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    label: str
    log: bool = False

    def share(self, value: float) -> float:
        """The position of a value on the axis, from 0 to 1."""
        low, high, value = (math.log(v) for v in (self.low, self.high, value)) if self.log else (*self[:2], value)
        return (value - low) / (high - low)


class Line(NamedTuple):
    """The points of a series; a point that is not finite interrupts the line."""

    series: int
    points: Sequence[tuple[float, float]]
    titles: Sequence[str] = ()  # of a marker at each point; empty: no markers
    style: str = "line"  # its CSS class: "line", or "guess" for dots


class Mark(NamedTuple):
    """A marker of a series, with a title."""

    series: int
    x: float
    y: float
    title: str


class Point(NamedTuple):
    """A point with a label."""

    series: int
    x: float
    y: float
    name: str


def axis(high: float, label: str) -> Axis:
    """An axis from 0 to the first round number that is at least ``high``, with about five ticks.

    >>> axis(0.37, "error").ticks[-1], axis(1_500_000, "images").high
    ((0.4, '0.4'), 1500000.0)
    """
    rough = high / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= 0.999 * rough)
    count = math.ceil(high / step - 1e-6)
    return Axis(0.0, count * step, [(i * step, f"{i * step:,.10g}") for i in range(count + 1)], label)


def log_axis(values: Sequence[float], label: str) -> Axis:
    """A logarithmic axis around positive values with ticks at round numbers; a narrow range has more of them."""
    low, high = (
        min(values, default=1.0) / 1.3,
        max(values, default=1.0) * 1.6,
    )  # room for the labels on the right of the points
    leading = (1, 1.5, 2, 3, 4, 5, 7) if high < 6 * low else (1, 2, 5) if high < 300 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [n * 10.0**power for power in powers for n in leading]
    return Axis(low, high, [(value, f"{value:g}") for value in candidates if low <= value <= high], label, log=True)


def lines(
    title: str,
    description: str,
    series: Sequence[Line],
    x: Axis,
    y: Axis,
    borders: Sequence[float] = (),
    diagonal: bool = False,
    events: Sequence[Mark] = (),
) -> Markup:
    """A line chart, with vertical lines at ``borders``, a ``diagonal`` where x = y, and marks of ``events``."""
    longest = max((len(name) for _, name in x.ticks), default=0)
    tilted = longest > HORIZONTAL
    plot = _Plot(x, y, 34 + min(longest, LONGEST) * LETTER * 0.64 if tilted else 48.0)
    marks: list[Child] = []
    if borders:
        marks.append(tag("path", class_="border", d="".join(f"M{plot.point(b, y.low)}V{number(TOP)}" for b in borders)))
    if diagonal:
        marks.append(tag("path", class_="ideal", d=f"M{plot.point(x.low, x.low)}L{plot.point(x.high, x.high)}"))
    for line in series:
        spots = [plot.point(*point) if math.isfinite(point[1]) else None for point in line.points]
        path = "".join(("L" if i and spots[i - 1] else "M") + spot for i, spot in enumerate(spots) if spot)
        titled = zip(line.points, line.titles, strict=bool(line.titles))
        dots = [plot.mark(line.series, *point, text) for point, text in titled if math.isfinite(point[1])]
        marks.append(tag("g", tag("path", class_=line.style, d=path), dots, class_=f"m{line.series}"))
    marks += [tag("g", plot.mark(*event), class_=f"m{event.series}") for event in events]
    return plot.svg(title, description, marks, tilted)


def scatter(title: str, description: str, points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    """A scatter plot; a label covers neither a point nor another label, if possible."""
    plot = _Plot(x, y, 48.0)
    points = sorted(points, key=lambda point: (-point.x, point.y))  # those on the right have the fewest places
    spots = [plot.at(point.x, point.y) for point in points]
    taken = [Box(across - 5, across + 5, down - 5, down + 5) for across, down in spots]
    marks: list[Child] = []
    for point, (across, down) in zip(points, spots, strict=True):
        name = _shorten(point.name, 2 * LONGEST)
        box = _free_box(across, down, LETTER * len(name), taken, plot.floor)
        taken.append(box)
        label = tag("text", name, x=box.left, y=box.bottom - 3)
        marks.append(tag("g", plot.mark(point.series, point.x, point.y, ""), label, class_=f"m{point.series}"))
    return plot.svg(title, description, marks, False)


class Box(NamedTuple):
    """A rectangle on the chart."""

    left: float
    right: float
    top: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Whether two rectangles overlap."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def _free_box(across: float, down: float, wide: float, taken: Sequence[Box], floor: float) -> Box:
    """The nearest free place for a label beside a point; the first place if none is free."""
    lefts = (across + 8, min(max(across - wide / 2, LEFT), WIDTH - wide), across - 8 - wide)
    shifts = sorted((step * sign for step in range(0, 120, 4) for sign in (1, -1)), key=abs)
    candidates = [Box(left, left + wide, down - 7 + s, down + 7 + s) for s in shifts for left in lefts]
    inside = [
        box for box in candidates if box.left >= LEFT and box.right <= WIDTH and box.top >= TOP and box.bottom <= floor
    ]
    return next((box for box in inside if not any(box.overlaps(other) for other in taken)), candidates[0])


def _shorten(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def heat(
    title: str, description: str, shares: Sequence[Sequence[float]], across: str, down: str, names: Sequence[str] = ()
) -> Markup:
    """A heat map of shares from 0 to 1 in ten tints; ``down`` is the label of the rows if they have no names."""
    rows, columns = len(shares), len(shares[0])
    left = 14 + min(LONGEST, max(map(len, names))) * LETTER if names else 24.0
    wide = (WIDTH - left - RIGHT) / columns
    high = wide if rows == columns else min(HEIGHT / rows, 18.0)
    cells: dict[int, list[str]] = {}
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            cell = f"M{number(left + j * wide)} {number(4 + i * high)}h{number(wide)}v{number(high)}h-{number(wide)}z"
            cells.setdefault(tint(share), []).append(cell)
    paths = [tag("path", class_=f"f{level}", d="".join(cells[level])) for level in sorted(cells) if level]
    bottom, middle = 4 + rows * high, 4 + rows * high / 2
    frame = tag("rect", class_="frame", x=left, y=4, width=columns * wide, height=rows * high)
    labels = [tag("text", across, x=left + columns * wide / 2, y=bottom + 16, text_anchor="middle")]
    if names:
        places = [4 + (i + 0.5) * high + 4 for i in range(rows)]
        labels += [
            tag("text", _shorten(n, LONGEST), x=left - 6, y=y, text_anchor="end")
            for n, y in zip(names, places, strict=True)
        ]
    else:
        labels.append(tag("text", down, transform=f"translate(15 {number(middle)}) rotate(-90)", text_anchor="middle"))
    return _svg(title, description, bottom + 22, [paths, frame, labels])


def tint(share: float) -> int:
    """The tint of a share, from 0 (none) to 10.

    >>> tint(0.04), tint(0.5), tint(1.0), tint(math.nan)
    (0, 5, 10, 0)
    """
    return max(0, min(10, round(10 * share))) if math.isfinite(share) else 0


def marker(series: int) -> str:
    """The marker of a series; series with the same colour have different markers.

    >>> marker(0), marker(8), marker(17)
    ('k0', 'k1', 'k3')
    """
    return f"k{(series + series // len(MARKERS)) % len(MARKERS)}"


class _Plot(NamedTuple):
    """The area between two axes."""

    x: Axis
    y: Axis
    bottom: float

    @property
    def floor(self) -> float:
        return HEIGHT - self.bottom + 20

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = LEFT + self.x.share(x) * (WIDTH - LEFT - RIGHT)
        return across, self.floor - self.y.share(y) * (self.floor - TOP)

    def point(self, x: float, y: float) -> str:
        return " ".join(map(number, self.at(x, y)))

    def mark(self, series: int, x: float, y: float, title: str) -> Markup:
        across, down = self.at(x, y)
        return tag("use", tag("title", title) if title else None, href=f"#{marker(series)}", x=across, y=down)

    def svg(self, title: str, description: str, marks: Child, tilted: bool) -> Markup:
        """The chart: grid, ticks, labels of the axes, and the marks."""
        grid, names = [], []
        for value, name in self.y.ticks:
            across, down = self.at(self.x.low, value)
            grid.append(f"M{number(LEFT)} {number(down)}H{number(WIDTH - RIGHT)}")
            names.append(tag("text", name, x=across - 6, y=down + 4, text_anchor="end"))
        for value, name in self.x.ticks:
            across, down = self.at(value, self.y.low)
            grid.append(f"M{number(across)} {number(down)}v4")
            short = _shorten(name, LONGEST)
            if tilted:
                place = f"translate({number(across + 4)} {number(down + 14)}) rotate(-40)"
                names.append(tag("text", short, transform=place, text_anchor="end"))
            else:
                names.append(tag("text", short, x=across, y=down + 17, text_anchor="middle"))
        middle = (TOP + self.floor) / 2
        labels = (
            tag("text", self.x.label, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT + 16, text_anchor="middle"),
            tag("text", self.y.label, transform=f"translate(11 {number(middle)}) rotate(-90)", text_anchor="middle"),
        )
        lines = tag("path", class_="grid", d="".join(grid))
        return _svg(title, description, HEIGHT + 22, [lines, names, labels, marks])


def _svg(title: str, description: str, height: float, inside: Child) -> Markup:
    """An image that scales with the page; title and description serve screen readers."""
    size = f"0 0 {number(WIDTH)} {number(height)}"
    return tag("svg", tag("title", title), tag("desc", description), inside, viewBox=size, role="img", class_="chart")
