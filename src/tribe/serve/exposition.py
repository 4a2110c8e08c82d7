"""Counters, gauges and histograms in the text format that Prometheus reads: version 0.0.4.

All of it is used by one thread, the event loop's, so that counting a request takes no lock.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

Labels = tuple[tuple[str, str], ...]

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # upper ends of buckets
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Counter:
    """A number that only grows, one for each combination of labels."""

    kind = "counter"

    def __init__(self, name: str, words: str) -> None:
        self.name, self.words = name, words
        self.values: dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add to the number with these labels."""
        key = tuple(labels.items())
        self.values[key] = self.values.get(key, 0) + amount

    def total(self, **labels: str) -> float:
        """The sum of the numbers that have these labels."""
        wanted = set(labels.items())
        return sum(value for key, value in self.values.items() if wanted <= set(key))

    def lines(self, common: Labels) -> Iterable[str]:
        """The samples."""
        return (f"{self.name}{show(common + key)} {number(value)}" for key, value in (self.values or {(): 0}).items())


class Histogram:
    """How often a value fell into each bucket, their sum and their number."""

    kind = "histogram"

    def __init__(self, name: str, words: str, ends: tuple[float, ...] = SECONDS) -> None:
        self.name, self.words, self.ends = name, words, ends
        self.counts = [0] * (len(ends) + 1)  # the last one: above all ends
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.ends, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)

    def lines(self, common: Labels) -> Iterable[str]:
        """The samples; a bucket counts all values up to its end."""
        total = 0
        for end, count in zip((*map(number, self.ends), "+Inf"), self.counts, strict=True):
            total += count
            yield f"{self.name}_bucket{show((*common, ('le', end)))} {total}"
        yield f"{self.name}_sum{show(common)} {number(self.sum)}"
        yield f"{self.name}_count{show(common)} {total}"


def exposition(metrics: Iterable[Counter | Histogram], common: Labels = ()) -> str:
    """The metrics as text; all samples get the ``common`` labels."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {escape(metric.words, quotes=False)}", f"# TYPE {metric.name} {metric.kind}"]
        lines += metric.lines(common)
    return "".join(f"{line}\n" for line in lines)


def gauge(name: str, words: str, values: Mapping[Labels, float]) -> Counter:
    """A number that is read when it is asked for."""
    metric = Counter(name, words)
    metric.kind, metric.values = "gauge", dict(values)
    return metric


def show(labels: Labels) -> str:
    r"""Labels between braces.

    >>> show((("stream", 'a"b\n'),))
    '{stream="a\\"b\\n"}'
    """
    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in labels) + "}" if labels else ""


def escape(text: str, quotes: bool = True) -> str:
    """Escape what would end a value or a line."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def number(value: float) -> str:
    """A number as short as it can be written.

    >>> number(3.0), number(0.25)
    ('3', '0.25')
    """
    return str(int(value)) if float(value).is_integer() else repr(float(value))
