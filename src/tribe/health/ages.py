"""How long ago, in words a person uses: "2h", "90 min", "500 images"."""

import re
from typing import Any, NamedTuple

from tribe.fields import document, is_number, is_whole, require

SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
SHORT = {"s": "second", "sec": "second", "m": "minute", "min": "minute", "h": "hour", "hr": "hour", "d": "day"}
PART = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?|\.\d+)\s*([a-z]+)", re.IGNORECASE)
UNDERSTOOD = 'an age is a text such as "30 s", "90 min", "2h", "1 day", "1h 30min" or "500 images"'


class Age(NamedTuple):
    """How long ago: in seconds or in images, not both."""

    seconds: float | None = None
    images: int | None = None

    def __str__(self) -> str:
        return f"{self.images:,} images" if self.seconds is None else show_seconds(self.seconds)


document(
    Age,
    seconds="Seconds of the history's clock; None: the age is in images.",
    images="Images that came to a stream while it learned; None: the age is in seconds.",
)


def parse_age(text: str) -> Age:
    """Read an age.

    >>> parse_age("1h 30min"), parse_age("500 images")
    (Age(seconds=5400.0, images=None), Age(seconds=None, images=500))
    """
    found, end, parts = 0.0, 0, []
    for match in PART.finditer(text):
        if match.start() != end:
            break
        end = match.end()
        parts.append((float(match[1].replace("_", "")), _unit(match[2].lower())))
    units = [unit for _, unit in parts]
    require(bool(parts) and not text[end:].strip() and None not in units, UNDERSTOOD, text)
    if "image" in units:
        count = parts[0][0]
        require(len(parts) == 1 and count.is_integer(), "an age in images is one whole number of them", text)
        return Age(images=int(count))
    found = sum(number * SECONDS[unit] for number, unit in parts if unit is not None)
    return Age(seconds=found)


def _unit(word: str) -> str | None:
    singular = SHORT.get(word) or (word.removesuffix("s"))
    return singular if singular == "image" or singular in SECONDS else None


def as_age(text: Any = None, images: Any = None, seconds: Any = None) -> Age:
    """An age from a text or a number; exactly one is given."""
    given = [value for value in (text, images, seconds) if value is not None]
    if len(given) != 1:
        raise TypeError(
            'say how far: "2h", "500 images", images=500, seconds=30 or a snapshot; '
            + (f"got {len(given)} of them" if given else "nothing was given")
        )
    if images is not None:
        require(is_whole(images, least=0), "images is a whole number, at least 0", images)
        return Age(images=int(images))
    if seconds is not None:
        require(is_number(seconds) and seconds >= 0, "seconds is a number, at least 0", seconds)
        return Age(seconds=float(seconds))
    if not isinstance(text, str):
        raise TypeError(f"{UNDERSTOOD}, or a snapshot; got {type(text).__name__}")
    return parse_age(text)


def show_seconds(seconds: float) -> str:
    """Seconds in the largest unit that gives at least 1.

    >>> show_seconds(5400), show_seconds(12), show_seconds(0.25)
    ('1.5 h', '12 s', '0.25 s')
    """
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
