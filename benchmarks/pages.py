"""Pages with generated blocks: a block stands between two comments that name it and the command that makes it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
Block = Callable[[Path], str]


def rendered(text: str, study: str, blocks: Mapping[str, Block], folder: Path = RESULTS) -> str:
    """A page with the generated blocks of a study brought up to date."""
    for name, block in blocks.items():
        start, end = f"<!-- {name}: python -m benchmarks.{study} --render -->\n", f"<!-- /{name} -->\n"
        before, found, rest = text.partition(start)
        if found:
            text = f"{before}{start}\n{block(folder)}\n{end}{rest.partition(end)[2]}"
    return text


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
