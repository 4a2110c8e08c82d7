"""Events of MkDocs: pages that are made while the site is built, and links that leave docs/.

In the Markdown of a page, ``<!-- gallery: NAME -->`` is replaced by pictures, see `website.galleries`, or by a link to
the report of the results in the repository.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tribe.experiments.report import collect, render
from website import galleries, links, reference

REPORT = "report.html"
GALLERY = re.compile(r"<!-- gallery: (\w+) -->")
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
DRAWING = re.compile(r'<img alt="[^"]*" src="([^"]+\.svg)"[^>]*>')
origins: dict[str, str] = {}  # of pages of the repository: place on the site, path in the repository


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the menu: decisions, the API reference, and new pages, which are listed with the guides."""
    listed = set(re.findall(r"[\w/.-]+\.md", str(config.nav)))
    for section in config.nav or []:
        for title, entries in section.items():
            if title == "Guides":
                entries += [{_title(path): path.name} for path in _pages() if path.name not in listed]
            if title == "API":
                entries += [{page.title: page.place} for page in reference.pages()]
            if title == "Decisions":
                entries += [{_title(path): f"decisions/{path.name}"} for path in _decisions()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages that are outside docs/, pages of linked code, the reference, and pictures."""
    made: dict[str, str | bytes] = {page.place: page.text() for page in reference.pages()}
    made["reference/index.md"] = reference.overview()
    made["decisions/index.md"] = _list_of_decisions()
    made |= {place: (links.ROOT / path).read_text() for path, place in links.OUTSIDE.items()}
    made |= galleries.pictures()
    made[REPORT] = render(collect(links.ROOT / "results"))
    origins.update({file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()})
    origins.update({place: path for path, place in links.OUTSIDE.items()})
    texts = {page: (links.ROOT / page).read_text() for page in origins.values()}
    for page, text in texts.items():
        for target in links.targets(text):
            path = links.repository_path(page, target)
            place = links.address(path)
            if place.startswith("source/") and place not in made:
                raw = path.endswith(links.RAW)
                made[place] = (links.ROOT / path).read_bytes() if raw else links.source_page(path)
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to where their targets are on the site, and put pictures in their place."""
    place = page.file.src_uri
    if place not in origins:  # made here, with links of the site
        return markdown
    text = links.nested_lists(links.for_the_site(markdown, origins[place], place))
    there = posixpath.relpath(REPORT, posixpath.dirname(place) or ".")
    report = f"[The report of this project's own results]({there}) is made while the site is built."
    return GALLERY.sub(lambda match: report if match[1] == "report" else galleries.markdown(match[1]), text)


def on_page_content(html: str, **_: Any) -> str:
    """Mark cells of tables with a long text, which get more room, and short ones, which are not broken.

    A drawing links to its file: on a phone it can be opened there and enlarged.
    """
    html = CELL.sub(lambda cell: f"<td{_kind(cell[2])}{cell[1]}>{cell[2]}</td>", html)
    return DRAWING.sub(lambda drawing: f'<a href="{drawing[1]}">{drawing[0]}</a>', html)


def _kind(cell: str) -> str:
    length = len(re.sub("<[^>]+>", "", cell))
    return ' class="long"' if length > 50 else ' class="short"' if length <= 12 else ""


def _pages() -> list[Path]:
    return sorted((links.ROOT / "docs").glob("*.md"))


def _decisions() -> list[Path]:
    return sorted((links.ROOT / "docs/decisions").glob("0*.md"))


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")


def _list_of_decisions() -> str:
    rows = "".join(f"- [{_title(path)}]({path.name})\n" for path in _decisions())
    return f"# Decisions\n\nWhat was decided, and why. A changed decision gets a new page, not an edit.\n\n{rows}"
