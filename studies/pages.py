"""Pages of studies: README.md beside the results, with generated tables between comments that name them."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

Block = Callable[[Path], str]


def render(study: Path, blocks: Mapping[str, Block]) -> None:
    """Bring the generated tables in the README of a study up to date."""
    page = study / "README.md"
    page.write_text(rendered(page.read_text(), blocks, study / "results"))


def rendered(text: str, blocks: Mapping[str, Block], results: Path) -> str:
    """Return a page with its generated tables made from a folder of results."""
    for name, block in blocks.items():
        start, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
        before, found, rest = text.partition(start)
        if found:
            text = f"{before}{start}\n{block(results)}\n{end}{rest.partition(end)[2]}"
    return text


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def play_or_render(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    study: Path,
    blocks: Mapping[str, Block],
    measure: Callable[[argparse.Namespace], None],
    draw: Callable[[Path], None] | None = None,
) -> None:
    """Read the options of a study and measure; with ``--render`` write the tables of its README instead.

    ``draw`` then also draws its picture, from its folder of results.
    """
    parser.add_argument("--render", action="store_true", help="write the tables of README.md, and play nothing")
    options = parser.parse_args(argv)
    if options.render:
        render(study, blocks)
        if draw is not None:
            draw(study / "results")
    else:
        measure(options)
