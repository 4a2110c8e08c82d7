"""The blocks of code of a page: files, code and commands in the order in which a reader meets them."""

import re
from typing import NamedTuple

from website.links import ROOT

FENCE = re.compile(r'^```(python|sh|text)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block: Python with a title is a file; text is what the block before it prints."""

    language: str
    title: str
    code: str

    def commands(self) -> list[str]:
        """The commands of a shell block, one a line."""
        return self.code.replace("\\\n", " ").splitlines()


def blocks(page: str) -> list[Block]:
    """The blocks of a page below docs/."""
    return [Block(*found) for found in FENCE.findall((ROOT / "docs" / page).read_text())]
