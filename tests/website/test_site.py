"""The site as people meet it: built as `make site` does, every link followed, in a real browser."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag, urlparse

import pytest
import yaml

pytest.importorskip("mkdocs", reason="needs the extra docs: pip install '.[docs]'")
pytest.importorskip("material", reason="needs the extra docs: pip install '.[docs]'")
pytest.importorskip("mkdocstrings", reason="needs the extra docs: pip install '.[docs]'")

pytest.importorskip("latex2mathml", reason="needs the extra docs: pip install '.[docs]'")

from browsers import needs_chromium, started_chromium
from places import ROOT
from tribe import corruptions, methods, scenarios
from website.method_pages import LINKS, equations

pytestmark = pytest.mark.slow  # builds a hundred pages
WIDTHS = (390, 1440)


class Page(HTMLParser):
    """The anchors of a page, where it links to, what it loads, and its title."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded, self.title = {""}, [], [], None
        self.feed(path.read_text())

    def handle_data(self, data):
        if self.lasttag == "title" and self.title is None:
            self.title = data

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("img", "script", "iframe", "source") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("href") and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given["href"])


def test_every_link_and_anchor_exists_and_nothing_is_loaded_from_elsewhere(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 60
    missing = []
    for path, page in pages.items():
        assert [url for url in page.loaded if urlparse(url).scheme not in ("", "data")] == [], path
        for url in page.links + page.loaded:
            place, anchor = urldefrag(url)
            if urlparse(url).scheme or path.name == "404.html":  # its links start at the root of a server
                continue
            target = (path.parent / unquote(place)).resolve() if place else path
            if not target.exists() or (target in pages and unquote(anchor) not in pages[target].anchors):
                missing.append(f"{path.relative_to(site)}: {url}")
    assert missing == []
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?https?:[^)]*", path.read_text()) == [], path


def test_the_servers_page_is_shown_in_both_schemes(site):
    for name, picture in (("serving", "server"), ("try", "trial")):
        shown = Page(site / f"{name}.html").loaded
        assert {f"pictures/{picture}.png#only-light", f"pictures/{picture}.dark.png#only-dark"} <= set(shown)
        assert all((ROOT / f"docs/pictures/{picture}{kind}.png").stat().st_size < 150_000 for kind in ("", ".dark"))


def test_titles_differ_and_repeat_nothing(site):
    titles = [Page(path).title for path in site.rglob("*.html") if path.name != "404.html"]
    assert [title for title in titles if titles.count(title) > 1 or len({*title.split(" - ")}) == 1] == []


def test_the_menu_names_every_file_once():
    from website import hooks

    def files(part):
        values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return [part] if isinstance(part, str) else [place for value in values for place in files(value)]

    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    nav = files(hooks.on_config(SimpleNamespace(nav=yaml.safe_load(text)["nav"])).nav)
    assert len(nav) > 60
    assert [place for place in nav if nav.count(place) > 1] == []


@pytest.mark.parametrize("name", equations())
def test_a_method_has_a_page_with_its_equations_links_and_source(site, name):
    path, cls = site / f"methods/{name}.html", methods.get(name)
    page, html = Page(path), path.read_text()
    assert 'class="equation"' in html
    assert "arithmatex" not in html
    assert any(link.startswith("../reference/methods.html#") for link in page.links)
    assert html.count(f'class</span><span class="w"> </span><span class="nc">{cls.__name__}</span>') == 1
    assert name not in LINKS or LINKS[name].replace(".md", ".html") in page.links
    assert f"methods/{name}.html" in Page(site / "methods.html").links


def test_galleries_show_every_corruption_and_every_scenario(site):
    page = (site / "corruptions.html").read_text()
    for name in corruptions.names("common"):
        for severity in corruptions.SEVERITIES:
            assert f"gallery/large/{name}-{severity}.jpg" in page
            assert f"gallery/small/{name}-{severity}.png" in page
    for name in corruptions.names("mnist"):
        assert f"gallery/digits/{name}-5.png" in page
    assert all(f"gallery/scenarios/{name}.png" in (site / "scenarios.html").read_text() for name in scenarios.names())


def test_the_reference_shows_every_method_and_the_comments_of_its_fields(site):
    text = re.sub("<[^>]+>", "", (site / "reference/methods.html").read_text())
    assert all(methods.get(name).__name__ in text for name in methods.names())
    assert "weight of the anchored loss" in text


def test_examples_are_code_with_its_output_and_never_quotes(site):
    shown = 0
    for path in (site / "reference").glob("*.html"):
        page = path.read_text()
        assert re.findall(r"<blockquote>(?:(?!</blockquote>).)*", page, re.DOTALL) == [], path.name
        assert page.count("&gt;&gt;&gt;") == page.count('<span class="gp">&gt;&gt;&gt; </span>'), path.name
        shown += page.count('<span class="go">')
    assert shown > 10


@needs_chromium
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_screen(site, width):
    pytest.importorskip("playwright.sync_api")
    with started_chromium() as browser:
        context = browser.new_context(viewport={"width": width, "height": 900})
        page, asked, complaints = context.new_page(), [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        wide = []
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wide.append(path.name)
        context.close()
    assert wide == []
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


HEADS = """() => [...document.querySelectorAll(".md-typeset__scrollwrap")].map((box) => {
  box.scrollTop = box.scrollHeight;
  box.scrollLeft = box.scrollWidth;
  const outer = box.getBoundingClientRect(), head = box.querySelector("thead").getBoundingClientRect();
  const last = box.querySelector("tbody tr:last-child > :last-child").getBoundingClientRect();
  const cell = box.querySelector("thead th").getBoundingClientRect();
  return [outer.height <= innerHeight, cell.top >= outer.top - 1, last.right <= outer.right + 1, head.height > 0];
})"""


@needs_chromium
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["methods", "reproduction", "budget"])
def test_the_end_of_every_table_can_be_reached_and_its_head_stays(site, width, name):
    pytest.importorskip("playwright.sync_api")
    with started_chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 700})
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_selector(".md-typeset__scrollwrap")
        found = page.evaluate(HEADS)
    assert found
    assert found == [[True] * 4] * len(found)


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_chart_has_the_ground_of_its_page_and_legible_words(site, scheme):
    pytest.importorskip("playwright.sync_api")
    with started_chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme=scheme)
        page.goto((site / "index.html").as_uri())
        shown = page.evaluate(
            "[...document.querySelectorAll('.chart img')].filter((e) => e.offsetWidth)"
            ".map((e) => [e.getAttribute('src'), e.offsetWidth])"
        )
    ((place, width),) = shown
    assert (".dark." in place) == (scheme == "dark")
    assert width >= 540  # of 547 units, in which words have 8 and 10 pixels


@needs_chromium
def test_search_works_in_pages_that_are_opened_as_files(site):
    sync_api = pytest.importorskip("playwright.sync_api")
    with started_chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto((site / "index.html").as_uri())
        box = page.locator("input.md-search__input")
        box.click()
        sync_api.expect(page.locator(".md-search-result__meta")).to_have_text("Type to start searching")
        box.press_sequentially("Balanced BN")
        sync_api.expect(page.locator(".md-search-result__item a").first).to_be_visible()
        assert "how-it-works.html" in page.locator(".md-search-result__list").inner_html()
