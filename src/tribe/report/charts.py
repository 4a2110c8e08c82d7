"""Small charts as SVG text: lines, points and maps that take their colours from the page they stand in.

Series are classes (``m0``, ``m1``, ...), to which the page gives a colour that suits a light or a dark background, and
markers ``#k0``, ``#k1``, ... that the page defines once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tribe.report.markup import Child, Markup, number, tag

WIDTH, HEIGHT = 440.0, 270.0
LEFT, RIGHT, TOP = 46.0, 20.0, 12.0
LETTER = 7.0  # width of a letter, about, at the size it has on a phone
LONGEST = 18  # letters of a label
UPRIGHT = 7  # letters of a label that still stands upright
MARKERS = (
    *("M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z", "M-3.2-3.2h6.4v6.4h-6.4z", "M0-4.6L4.6 0L0 4.6L-4.6 0z"),
    *("M0-4.4L4.2 3.2H-4.2z", "M0 4.4L4.2-3.2H-4.2z", "M-4.4 0L3.2-4.2V4.2z", "M4.4 0L-3.2-4.2V4.2z"),
    "M-4.2-1.3h2.9v-2.9h2.6v2.9h2.9v2.6h-2.9v2.9h-2.6v-2.9h-2.9z",
)


class Axis(NamedTuple):
    """A range of values and the ones that are named."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    label: str
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        low, high, value = (math.log(v) for v in (self.low, self.high, value)) if self.log else (*self[:2], value)
        return (value - low) / (high - low)


class Line(NamedTuple):
    """The points of a series; not finite ones interrupt it."""

    series: int
    points: Sequence[tuple[float, float]]
    words: Sequence[str] = ()  # a marker at each point says these; none: no markers


class Point(NamedTuple):
    """A value with its name beside it."""

    series: int
    x: float
    y: float
    name: str


def axis(high: float, label: str) -> Axis:
    """From 0 to the first round number that holds ``high``, with about five round numbers between.

    >>> axis(0.37, "error").ticks[-1], axis(1_500_000, "images").high
    ((0.4, '0.4'), 1500000.0)
    """
    rough = high / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= 0.999 * rough)
    count = math.ceil(high / step - 1e-6)
    return Axis(0.0, count * step, [(i * step, f"{i * step:,.10g}") for i in range(count + 1)], label)


def log_axis(values: Sequence[float], label: str) -> Axis:
    """Around positive values, with round numbers: the more, the narrower the range."""
    low, high = min(values) / 1.3, max(values) * 1.6  # names stand to the right of their points
    leading = (1, 1.5, 2, 3, 4, 5, 7) if high < 6 * low else (1, 2, 5) if high < 300 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [n * 10.0**power for power in powers for n in leading]
    return Axis(low, high, [(value, f"{value:g}") for value in found if low <= value <= high], label, log=True)


def lines(
    title: str,
    words: str,
    series: Sequence[Line],
    x: Axis,
    y: Axis,
    borders: Sequence[float] = (),
    diagonal: bool = False,
) -> Markup:
    """Curves; ``borders`` are marked along x, and a ``diagonal`` where x = y would be."""
    longest = max((len(name) for _, name in x.ticks), default=0)
    tilted = longest > UPRIGHT
    plot = _Plot(x, y, 34 + min(longest, LONGEST) * LETTER * 0.64 if tilted else 48.0)
    marks: list[Child] = []
    if borders:
        marks.append(tag("path", class_="border", d="".join(f"M{plot.spot(b, y.low)}V{number(TOP)}" for b in borders)))
    if diagonal:
        marks.append(tag("path", class_="ideal", d=f"M{plot.spot(x.low, x.low)}L{plot.spot(x.high, x.high)}"))
    for line in series:
        spots = [plot.spot(*point) if math.isfinite(point[1]) else None for point in line.points]
        path = "".join(("L" if i and spots[i - 1] else "M") + spot for i, spot in enumerate(spots) if spot)
        told = [(p, word) for p, word in zip(line.points, line.words, strict=bool(line.words)) if math.isfinite(p[1])]
        dots = [plot.mark(line.series, *point, word) for point, word in told]
        marks.append(tag("g", tag("path", class_="line", d=path), dots, class_=f"m{line.series}"))
    return plot.whole(title, words, marks, tilted)


def scatter(title: str, words: str, points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    """Points with their names beside them, each where it covers neither a point nor another name."""
    plot = _Plot(x, y, 48.0)
    points = sorted(points, key=lambda point: (-point.x, point.y))  # on the right there are fewest places for a name
    spots = [plot.at(point.x, point.y) for point in points]
    taken = [Box(across - 5, across + 5, down - 5, down + 5) for across, down in spots]
    marks: list[Child] = []
    for point, (across, down) in zip(points, spots, strict=True):
        name = _cut(point.name, 2 * LONGEST)
        box = _free(across, down, LETTER * len(name), taken, plot.floor)
        taken.append(box)
        label = tag("text", name, x=box.left, y=box.bottom - 3)
        marks.append(tag("g", plot.mark(point.series, point.x, point.y, ""), label, class_=f"m{point.series}"))
    return plot.whole(title, words, marks, False)


class Box(NamedTuple):
    """A place on the chart."""

    left: float
    right: float
    top: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        """Whether they overlap."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def _free(across: float, down: float, wide: float, taken: Sequence[Box], floor: float) -> Box:
    """The nearest place for a name beside a point; where all are taken, the first."""
    lefts = (across + 8, min(max(across - wide / 2, LEFT), WIDTH - wide), across - 8 - wide)
    shifts = sorted((step * sign for step in range(0, 120, 4) for sign in (1, -1)), key=abs)
    tried = [Box(left, left + wide, down - 7 + s, down + 7 + s) for s in shifts for left in lefts]
    inside = [
        box for box in tried if box.left >= LEFT and box.right <= WIDTH and box.top >= TOP and box.bottom <= floor
    ]
    return next((box for box in inside if not any(box.meets(other) for other in taken)), tried[0])


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def heat(
    title: str, words: str, shares: Sequence[Sequence[float]], across: str, down: str, names: Sequence[str] = ()
) -> Markup:
    """A map of shares from 0 to 1 in ten tints, row by row from the top; ``down`` says what rows without names are."""
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
            tag("text", _cut(n, LONGEST), x=left - 6, y=y, text_anchor="end")
            for n, y in zip(names, places, strict=True)
        ]
    else:
        labels.append(tag("text", down, transform=f"translate(15 {number(middle)}) rotate(-90)", text_anchor="middle"))
    return _svg(title, words, bottom + 22, [paths, frame, labels])


def tint(share: float) -> int:
    """One of ten tints for a share; 0 is none.

    >>> tint(0.04), tint(0.5), tint(1.0), tint(math.nan)
    (0, 5, 10, 0)
    """
    return max(0, min(10, round(10 * share))) if math.isfinite(share) else 0


def marker(series: int) -> str:
    """The marker of a series; those that share a colour differ in it.

    >>> marker(0), marker(8), marker(17)
    ('k0', 'k1', 'k3')
    """
    return f"k{(series + series // len(MARKERS)) % len(MARKERS)}"


class _Plot(NamedTuple):
    """The space between two axes."""

    x: Axis
    y: Axis
    bottom: float

    @property
    def floor(self) -> float:
        return HEIGHT - self.bottom + 20

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = LEFT + self.x.share(x) * (WIDTH - LEFT - RIGHT)
        return across, self.floor - self.y.share(y) * (self.floor - TOP)

    def spot(self, x: float, y: float) -> str:
        return " ".join(map(number, self.at(x, y)))

    def mark(self, series: int, x: float, y: float, word: str) -> Markup:
        across, down = self.at(x, y)
        return tag("use", tag("title", word) if word else None, href=f"#{marker(series)}", x=across, y=down)

    def whole(self, title: str, words: str, marks: Child, tilted: bool) -> Markup:
        """The finished picture: grid, names of the ticks, axes, and what is drawn between them."""
        grid, names = [], []
        for value, name in self.y.ticks:
            across, down = self.at(self.x.low, value)
            grid.append(f"M{number(LEFT)} {number(down)}H{number(WIDTH - RIGHT)}")
            names.append(tag("text", name, x=across - 6, y=down + 4, text_anchor="end"))
        for value, name in self.x.ticks:
            across, down = self.at(value, self.y.low)
            grid.append(f"M{number(across)} {number(down)}v4")
            short = _cut(name, LONGEST)
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
        return _svg(title, words, HEIGHT + 22, [tag("path", class_="grid", d="".join(grid)), names, labels, marks])


def _svg(title: str, words: str, height: float, inside: Child) -> Markup:
    """A picture that scales with the page, and that says in words what it shows."""
    size = f"0 0 {number(WIDTH)} {number(height)}"
    return tag("svg", tag("title", title), tag("desc", words), inside, viewBox=size, role="img", class_="chart")
