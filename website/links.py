"""Where a link of a page leads on the site.

Pages are written to be read in the repository, too: they link to code, to folders and to pages outside docs/. On the
site each such file is a page of its own, so that every link works without the repository.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
NESTED = re.compile(r"^ {2,3}(?=[-*] )", re.MULTILINE)
TARGET = re.compile(r"(\]\()([^)\s]+)(\))")

# Pages outside docs/, and where they are on the site.
OUTSIDE = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "results/README.md": "project/results.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".sh": "sh", ".md": "markdown"}
RAW = (".json", ".jsonl", ".csv", ".npz", ".svg", ".png")  # copied as they are: a browser shows or saves them


def pieces(text: str) -> Iterator[tuple[bool, str]]:
    """The parts of a Markdown text in order: whether it is a block of code, and its text."""
    end = 0
    for block in FENCE.finditer(text):
        yield False, text[end : block.start()]
        yield True, block.group()
        end = block.end()
    yield False, text[end:]


def targets(text: str) -> list[str]:
    """The targets of links into the repository, without their anchors; blocks of code are left out."""
    found = [match[2] for is_code, part in pieces(text) if not is_code for match in TARGET.finditer(part)]
    return [target.partition("#")[0] for target in found if "://" not in target and not target.startswith("#")]


def repository_path(page: str, target: str) -> str:
    """The path in the repository that a target means on a page, which is given by its path in the repository.

    >>> repository_path("docs/decisions/0001-row-axis.md", "../../src/tribe/streams/adapter.py")
    'src/tribe/streams/adapter.py'
    """
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def address(path: str) -> str:
    """Where a file or folder of the repository is on the site, as the path of its source.

    >>> address("docs/time.md"), address("CONTRIBUTING.md"), address("src/tribe/streams/adapter.py")
    ('time.md', 'project/contributing.md', 'source/src/tribe/streams/adapter.py.md')
    """
    if not (ROOT / path).exists() and not path.startswith(f"{DOCS}/"):  # MkDocs names links that are missing in docs/
        raise ValueError(f"a page links to {path}, which is not in the repository")
    readme = posixpath.join(path, "README.md")
    if readme in OUTSIDE and path != ".":
        return OUTSIDE[readme]
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith(f"{DOCS}/"):
        inside = path.removeprefix(f"{DOCS}/")
        return f"{inside}/index.md" if (ROOT / path).is_dir() else inside
    return f"source/{path}" if path.endswith(RAW) else f"source/{path}.md"


def for_the_site(text: str, page: str, place: str) -> str:
    """A page's text with the targets that leave docs/ replaced.

    Args:
        text: Markdown.
        page: its path in the repository.
        place: its path on the site.
    """

    def replace(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        if "://" in target or not target:
            return match[0]
        there = posixpath.relpath(address(repository_path(page, target)), posixpath.dirname(place) or ".")
        return f"{match[1]}{there}{hash_sign}{anchor}{match[3]}"

    return "".join(part if is_code else TARGET.sub(replace, part) for is_code, part in pieces(text))


def nested_lists(text: str) -> str:
    """A text with lists inside lists indented by four, as Python's Markdown expects; GitHub takes two as well.

    >>> nested_lists("- a\\n  - b")
    '- a\\n    - b'
    """
    return "".join(part if is_code else NESTED.sub("    ", part) for is_code, part in pieces(text))


def source_page(path: str) -> str:
    """The page of a file or folder that is no page: its text, or the names in it."""
    place = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    if place.is_dir():
        return head + "".join(f"- `{name}`\n" for name in sorted(child.name for child in place.iterdir()))
    text = place.read_text()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{head}{fence}{LANGUAGES.get(PurePosixPath(path).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
