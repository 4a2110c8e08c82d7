"""Links of pages lead somewhere on the site. What MkDocs makes of them is in test_site.py."""

import re

import pytest

from places import ROOT
from website import links

PAGES = [*links.OUTSIDE, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("docs/time.md", "time.md"),
        ("docs/decisions", "decisions/index.md"),
        ("CONTRIBUTING.md", "project/contributing.md"),
        ("results", "project/results.md"),
        ("src/tribe/streams/adapter.py", "source/src/tribe/streams/adapter.py.md"),
        ("benchmarks/results/h200.json", "source/benchmarks/results/h200.json"),
        ("NOTICE", "source/NOTICE.md"),
    ],
)
def test_files_of_the_repository_have_a_place(path, place):
    assert links.address(path) == place


def test_a_link_to_nothing_is_refused():
    with pytest.raises(ValueError, match="links to src/nothing"):
        links.for_the_site("[x](../src/nothing.py)", "docs/page.md", "page.md")


def test_links_are_rewritten_outside_code_only():
    text = "See [a](../src/tribe/streams/adapter.py#L1), [b](time.md) and [c](https://x.org/).\n\n```\n[d](../src/no.py)\n```\n[e](#f)"
    assert links.for_the_site(text, "docs/page.md", "page.md") == (
        "See [a](source/src/tribe/streams/adapter.py.md#L1), [b](time.md) and [c](https://x.org/).\n\n"
        "```\n[d](../src/no.py)\n```\n[e](#f)"
    )
    moved = links.for_the_site("[a](docs/time.md) [b](NOTICE)", "README.md", "project/readme.md")
    assert moved == "[a](../time.md) [b](../source/NOTICE.md)"


def test_lists_inside_lists_are_indented_by_four():
    assert links.nested_lists("- a\n  - b\n    c\n\n```\n  - d\n```\n") == "- a\n    - b\n    c\n\n```\n  - d\n```\n"


def test_code_with_fences_is_shown_whole():
    page = links.source_page("website/code_blocks.py")
    assert page.count("\n````python\n") == 1, "its text holds a fence of three"
    assert page.rstrip().endswith("````")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_has_a_place(page):
    for target in links.targets((ROOT / page).read_text()):
        assert links.address(links.repository_path(page, target))


def test_the_menu_names_every_page_once():
    named = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2], re.M)
    assert len(named) > 20
    assert [name for name in set(named) if named.count(name) > 1] == []
