"""Charts that fit both schemes of the site: each committed one gets a dark variant, and a box in its page."""

import base64
import functools
import io
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs/pictures"
GROUND, INK = "#1e2129", "#e2e4e9"  # of a page in the dark scheme
DARK = {  # of each colour of tribe.experiments.plots, in the dark
    "#000000": INK,
    "#ffffff": GROUND,
    "#0072b2": "#58b0ea",
    "#d55e00": "#ff8f4a",
    "#009e73": "#3ecfa0",
    "#cc79a7": "#ea9fca",
    "#e69f00": "#f2bd4b",
    "#56b4e9": "#b3e0ff",
    "#999999": "#8b92a1",
    "#b0b0b0": "#6b7280",  # grids
    "#cccccc": "#4a505c",  # frames of legends
}
COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b(?=[;\"' ])")
BITMAP = re.compile(r'<image (?=xlink:href="data:image/png;base64,([^"]*)")')
SCREENSHOT = 720  # pixels of width at which its words can be read
IMAGE = re.compile(r"!\[([^\]]*)\]\((\S*?pictures/([\w-]+))\.(svg|png)\)")


def names() -> list[str]:
    """The charts among the pictures."""
    return sorted(path.stem for path in FOLDER.glob("*.svg") if path.stem != "favicon")


def pictures() -> dict[str, bytes]:
    """The dark variants, by their place on the site."""
    return {f"pictures/{name}.dark.svg": darkened(_read(name)).encode() for name in names()}


def darkened(svg: str) -> str:
    """Return a drawing of matplotlib in dark colours.

    Photographs in it stay as they are. Marks that it holds as a bitmap have nothing around them, and are inverted.

    Raises:
        ValueError: it has a colour that has no dark counterpart.
    """

    def swap(match: re.Match[str]) -> str:
        if (colour := match[0].lower()) not in DARK:
            raise ValueError(f"{colour} has no dark counterpart: add one to website/charts.py")
        return DARK[colour]

    def invert(match: re.Match[str]) -> str:
        return f'{match[0]}style="filter: invert(.9) hue-rotate(180deg)" ' if _transparent(match[1]) else match[0]

    svg = BITMAP.sub(invert, svg)
    return COLOUR.sub(swap, svg).replace("<svg ", f'<svg fill="{INK}" ', 1)  # what names no colour is black


def boxed(markdown: str) -> str:
    """Show each chart in the colours of the scheme; on a small screen it scrolls, and its words stay legible.

    A screenshot (PNG) has a dark variant beside it.
    """

    def box(match: re.Match[str]) -> str:
        alt, place, name, kind = " ".join(match[1].split()), match[2], match[3], match[4]
        if name not in names() and not (FOLDER / f"{name}.dark.png").exists():
            return match[0]
        fit = f'{{ style="min-width: {_width(name) if kind == "svg" else SCREENSHOT}px" }}'
        both = f"![{alt}]({place}.{kind}#only-light){fit}![{alt}]({place}.dark.{kind}#only-dark){fit}"
        return f'<div class="chart" tabindex="0" markdown="1">\n\n{both}\n\n</div>'

    return IMAGE.sub(box, markdown)


def _transparent(png: str) -> bool:
    from PIL import Image

    alpha = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA").getchannel("A")
    return bool(alpha.getextrema()[0] == 0)


def _width(name: str) -> int:
    """The width of a chart in pixels at which its words have their own size."""
    found = re.search(r'viewBox="0 0 ([\d.]+)', _read(name))
    if found is None:
        raise ValueError(f"{name}.svg has no viewBox")
    return round(float(found[1]))


@functools.cache
def _read(name: str) -> str:
    return (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
