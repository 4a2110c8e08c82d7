"""Events of MkDocs: pages and pictures that are made while the site is built, and links that leave docs/."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import charts, galleries, method_pages, playing
from website.methods import paths
from website.typesetting import typeset

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ("CONTRIBUTING", "SECURITY", "CHANGELOG")  # pages in the root of the repository
REFERENCE = {  # pages of the API: packages and modules, with all public names below them
    "tribe": ("tribe",),
    "methods": ("tribe.methods", "tribe.norms", "tribe.filters"),
    "health": ("tribe.health",),
    "data": ("tribe.data.datasets", "tribe.data.corruptions", "tribe.data.scenarios", "tribe.data.models"),
    "experiments": ("tribe.experiments",),
    "serve": ("tribe.serve",),
    "testing": ("tribe.testing",),
}
PLAY = "<!-- play -->"
GALLERY = re.compile(r"<!-- gallery: (\w+) -->")
LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
NESTED = re.compile(r"^ {2,3}(?=[-*] )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the menu: decisions and the API reference."""
    for section in config.nav or []:
        if "Decisions" in section:
            section["Decisions"] += [{_title(path): f"decisions/{path.name}"} for path in _decisions()]
        if "API" in section:
            section["API"] += [{name: f"reference/{name}.md"} for name in REFERENCE]
        for part in section.get("Components", []):
            if "Each method" in part:
                part["Each method"] += [{name: f"methods/{name}.md"} for name in paths()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/: of the project, the decisions, the reference, and pictures."""
    made: dict[str, str | bytes] = {f"project/{n.lower()}.md": (ROOT / f"{n}.md").read_text() for n in PROJECT}
    entries = "".join(f"- [{_title(path)}]({path.name})\n" for path in _decisions())
    made["decisions/index.md"] = f"# Decisions\n\nDecisions, and the reasons for them.\n\n{entries}"
    for name, modules in REFERENCE.items():
        title = f"---\ntitle: 'API: {name}'\n---\n# {name}\n\n"
        made[f"reference/{name}.md"] = title + "\n\n".join(map(_reference, modules)) + "\n"
    for place, content in (
        made | method_pages.pages() | charts.pictures() | galleries.pictures() | playing.files()
    ).items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Put galleries, charts and the page "Try it" in their place, and make links work on the site.

    A link to the file of a method goes to the page of the method; one to another file of the repository that is not on
    the site becomes its text. Lists inside lists get the indent that
    Python's Markdown expects.
    """
    place = page.file.src_uri
    name = posixpath.basename(place).removesuffix(".md").upper()
    folder = "" if place.startswith("project/") and name in PROJECT else f"docs/{posixpath.dirname(place)}"

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        there = f"project/{path.lower()}" if path.removesuffix(".md") in PROJECT else path.removeprefix("docs/")
        there = f"{there}/index.md" if (ROOT / path).is_dir() else there
        if methods := [name for name, file in paths().items() if file == path]:
            there = f"methods/{next((name for name in methods if name == text.strip('`')), methods[0])}.md"
        if "://" in target or place.startswith("reference/"):
            return match[0]
        if files.get_file_from_path(there) is None:
            return text if (ROOT / path).exists() else match[0]  # MkDocs names links to nothing
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [charts.boxed(NESTED.sub("    ", LINK.sub(link, part))) for part in parts[::2]]
    whole = GALLERY.sub(lambda match: galleries.markdown(match[1]), "".join(parts))
    return whole.replace(PLAY, playing.markdown()) if PLAY in whole else whole


def on_page_content(html: str, **_: Any) -> str:
    """Typeset the equations."""
    return typeset(html)


def _reference(module: str) -> str:
    return f"::: {module}\n    options:\n      show_submodules: {str(module != 'tribe').lower()}"


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs/decisions").glob("0*.md"))


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")
