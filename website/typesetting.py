"""Equations of the site: LaTeX in Markdown becomes MathML while the site is built, so that pages load no script."""

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex makes of $...$ and $$...$$.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
BAR = '<mo stretchy="false">&#x0007C;</mo>'  # as an operator it has spaces on both sides
SPACE = '<mspace width="0.17em"/>'
TAG = re.compile(r"\\tag\{(.*?)\}")


def typeset(page: str) -> str:
    """Return a page (HTML) with its equations in MathML; a displayed one has a box that scrolls, and its number."""
    page = INLINE.sub(lambda match: mathml(match[1], "inline"), page)
    return BLOCK.sub(lambda match: displayed(match[1]), page)


def displayed(latex: str) -> str:
    """Return the box of an equation; ``\\tag{5}`` numbers it, and it may be broken at ``\\qquad``."""
    number = "".join(f'<span class="number">({text})</span>' for text in TAG.findall(latex))
    parts = "".join(mathml(part, "block") for part in TAG.sub("", latex).split(r"\qquad"))
    return f'<div class="equation" tabindex="0"><div>{parts}</div>{number}</div>'


def mathml(latex: str, display: str) -> str:
    """Return an equation in MathML.

    Raises:
        ValueError: it has a command that latex2mathml does not know, which would be shown as it is.
    """
    latex = html.unescape(latex).strip()
    made = str(convert(latex, display=display))
    made = made.replace(BAR, "<mi>|</mi>").replace("<mi>log</mi>", f"{SPACE}<mi>log</mi>{SPACE}")
    if found := re.findall(r"\\\w*|>&<", made):
        raise ValueError(f"latex2mathml does not know {' '.join(found)} in {latex}: write the equation without it")
    return made
