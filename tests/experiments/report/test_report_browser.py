"""The report as people meet it: in a real browser, on a phone and a wide screen, by keyboard, by day and by night."""

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")

from test_report import keep, record

from browsers import CONTRASTS, SIZES, needs_chromium, watched_pages
from tribe.experiments import report

pytestmark = needs_chromium
FOCUSABLE = "a[href], button, input, summary, [tabindex='0']"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A report with all there is: several groups, many classes, no labels, long names, damaged and repeated files."""
    folder = tmp_path_factory.mktemp("runs")
    names = ("source", "bn", "tent", "tribe", "a_method_of_ones_own_with_a_long_name", "m5", "m6", "m7", "m8")
    runs = {f"a{i}x{s}": record(n, s, error=0.1 + 0.07 * i) for i, n in enumerate(names) for s in (0, 1)}
    domains = tuple(f"domain_number_{d}@5" for d in range(15))
    other = {"scenario": {"name": "iid", "fields": {}}, "domains": domains, "classes": 10}
    runs |= {f"b{n}": record(n, images=3000, **other) for n in names[:3]}
    runs |= {f"c{n}": record(n, classes=30, dataset={"name": "thirty"}) for n in names[:2]}
    runs |= {"d": record("tribe", label=-1, dataset={"name": "unlabelled"}), "again": record("source", 0, error=0.1)}
    keep(folder, **runs)
    (folder / "damaged.npz").write_bytes(b"no record")
    page = folder / "report.html"
    assert len(report.write(folder, page).damaged) == 1
    return page.as_uri()


@pytest.fixture
def visit(browser, url):
    """Open the page; whatever it asks of a network or complains about fails the test."""
    with watched_pages(browser) as open_page:

        def go(size="desktop", scheme="light", **options):
            width, height = SIZES[size]
            looks = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
            page = open_page((url, "data:"), **looks, **options)
            page.goto(url)
            return page

        yield go


def unfold_all(page):
    page.evaluate("document.querySelectorAll('details').forEach((folded) => { folded.open = true; })")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_can_be_looked_at(visit, tmp_path, size, scheme):
    page = visit(size, scheme)
    for name in ("folded", "unfolded"):
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        picture = tmp_path / f"{size}-{scheme}-{name}.png"
        page.screenshot(path=picture, full_page=name == "folded")
        assert picture.stat().st_size > 10_000
        unfold_all(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(visit, scheme):
    page = visit(scheme=scheme)
    unfold_all(page)
    found = page.evaluate(CONTRASTS)
    assert len(found) > 1000
    assert [text for text in found if text[0] < 4.5] == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("size", SIZES)
def test_the_keyboard_reaches_every_link_and_control_in_order_and_shows_where_it_is(visit, size):
    page = visit(size)
    for _ in ("folded", "unfolded"):
        expected = page.evaluate(
            f"""() => [...document.querySelectorAll("{FOCUSABLE}")].filter((e) => e.checkVisibility())
                .map((e, i) => {{ e.dataset.stop = i; return e.dataset.stop; }})"""
        )
        assert len(expected) > 50
        page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0)")
        page.evaluate(
            """() => {
                window.reached = [];
                document.addEventListener("focusin", ({ target }) =>
                    reached.push([target.dataset.stop, getComputedStyle(target).outlineStyle]));
            }"""
        )
        for _ in expected:
            page.keyboard.press("Tab")
        assert page.evaluate("reached") == [[stop, "solid"] for stop in expected]
        page.goto(page.url)
        unfold_all(page)


def test_the_first_stop_leads_past_the_navigation(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.locator(".skip").evaluate("(e) => e === document.activeElement && e.getBoundingClientRect().top >= 0")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")


def test_tables_are_sorted_by_their_heads(visit):
    page = visit()
    results = page.locator("#g1 table.sortable").first
    head = results.locator("th[data-col='1']")

    def shown():
        return [float(cell.split(" ")[0]) for cell in results.locator("tbody td:nth-child(2)").all_inner_texts()]

    before = shown()
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert shown() == sorted(before) != before[::-1]
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert shown() == sorted(before, reverse=True)
    results.locator("th[data-col='0'] button").click()
    names = results.locator("tbody th").all_inner_texts()
    assert names == sorted(names)
    assert head.get_attribute("aria-sort") is None


def test_a_method_can_be_taken_out_of_the_charts(visit):
    page = visit()
    curve, other = (page.locator(f"#g1 .chart .m{i}").first for i in (1, 2))
    page.locator("#show1").uncheck()
    assert not curve.is_visible()
    assert other.is_visible()
    assert page.locator("#g1 .matrix.m1").first.is_hidden()
    page.locator("#show1").check()
    assert curve.is_visible()


def test_a_number_leads_to_the_spec_that_made_it(visit):
    page = visit()
    page.locator(".overview tbody td a").first.click()
    origin = page.locator("details.origin[open]")
    assert origin.count() == 1
    assert '"method"' in origin.locator("pre").last.inner_text()


def test_it_reads_without_javascript(visit):
    page = visit(java_script_enabled=False)
    assert page.locator("button").count() == 0
    assert page.locator("#g1 .chart").first.is_visible()
    page.locator("#show1").uncheck()
    assert not page.locator("#g1 .chart .m1").first.is_visible()
    page.locator("details.origin summary").first.click()
    assert page.locator("details.origin pre").first.is_visible()


def test_on_paper_it_is_light_and_without_controls(visit):
    page = visit(scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("aside").is_visible()
    assert page.locator("#g1 .chart").first.is_visible()


@pytest.mark.parametrize("size", SIZES)
def test_many_streams_make_a_short_page_whose_links_open_what_is_folded(browser, tmp_path, size):
    runs = {
        f"r{i}{name}": record(name, scenario={"name": "gli-v", "fields": {"imbalance": i}}, dataset={"name": "d" * 30})
        for i in range(1, 13)
        for name in ("source", f"only{i}")
    }
    report.write(keep(tmp_path / "runs", **runs), tmp_path / "report.html")
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") < 5 * height
    assert page.evaluate("[...document.querySelectorAll('aside a')].every((a) => a.scrollWidth <= a.clientWidth + 1)")
    aside = page.locator(".held")
    assert aside.evaluate("(e) => e.scrollWidth <= e.clientWidth")
    page.locator("table.overview tbody tr").nth(11).locator("td a").first.click()
    opened = page.locator("section details.group[open]")
    assert opened.count() == 1
    assert opened.locator("details.origin[open]").count() == 1
    page.close()
