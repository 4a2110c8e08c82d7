"""HTML and SVG as nested calls. Every string that is not `Markup` is escaped."""

from collections.abc import Iterable
from html import escape

from tribe.fields import printable

VOID = frozenset(("br", "hr", "input", "link", "meta"))


class Markup(str):
    """Text that is markup already, so it is not escaped."""

    __slots__ = ()


Child = str | float | Iterable["Child"] | None


def text(value: Child) -> Markup:
    """A value as markup; None is empty.

    >>> text(["a < b", None, tag("b", 3)])
    'a &lt; b<b>3</b>'
    """
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup("")
    if isinstance(value, str | int | float):
        return Markup(escape(printable(str(value), keep="\n\t")))
    return Markup("".join(map(text, value)))


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """An element. In attribute names ``_`` becomes ``-``, and a trailing one is dropped. None and False omit one.

    >>> tag("a", "<x>", href="#x", class_="big", aria_label='"', hidden=False)
    '<a href="#x" class="big" aria-label="&quot;">&lt;x&gt;</a>'
    """
    joined = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    return Markup(f"<{name}{joined}>" + ("" if name in VOID else f"{text(children)}</{name}>"))


def number(value: float) -> str:
    """A coordinate, rounded to a tenth of a pixel.

    >>> number(3.0), number(-0.04), number(12.345)
    ('3', '0', '12.3')
    """
    short = f"{value:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


def _attribute(key: str, value: str | float | bool) -> str:
    if isinstance(value, bool):
        return f" {_hyphenated(key)}" if value else ""
    shown = number(value) if isinstance(value, float) else value
    return f' {_hyphenated(key)}="{text(shown)}"'


def _hyphenated(key: str) -> str:
    return key.removesuffix("_").replace("_", "-")
