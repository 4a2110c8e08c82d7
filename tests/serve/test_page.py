"""The page of a server as an operator meets it: a real browser, a real worker, by mouse and by keyboard."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")

from http_calls import IMAGES
from playwright.sync_api import expect
from small_server import serving, small_fleet, token
from version_networks import versions_of

import tribe
from browsers import CONTRASTS, PATIENCE, SIZES, needs_chromium, watched_pages
from tribe.serve.client import Client
from tribe.serve.config import Limits
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker
from tribe.testing import images, small_network
from watching import calibration_of, pictures

pytestmark = needs_chromium
STRANGE = '<script>document.title = "owned"</script><img src="x" onerror="document.title = 1">'
LONG = "line-3-camera-7-with-a-name-that-fills-the-row@hall-north.plant-2.example"


class Opened(Worker):
    """A worker that begins with some streams."""

    async def start(self):
        await super().start()
        for name in ("cam1", "cam2", LONG):
            await self.infer(name, images(1, 2)[0])


def opened(store=None, **options):
    return serving(Opened(small_fleet(), store), **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    store = SqliteStore(tmp_path_factory.mktemp("data"))
    with opened(store) as found:
        yield found
    store.close()


@pytest.fixture
def visit(browser):
    """Open a page; a request to another place, and any complaint of the browser, fails the test."""
    with watched_pages(browser) as open_page:

        def go(url, size="desktop", scheme="light", prepare=lambda page: None, expected=()):
            width, height = SIZES[size]
            known = ("ERR_CONNECTION_REFUSED", *expected)  # an open page asks a server that the test has ended

            def complains(message):
                return message.type == "error" and not any(words in message.text for words in known)

            looks = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
            page = open_page((url, f"blob:{url}", "data:"), complains, PATIENCE, **looks)
            prepare(page)
            page.goto(url)
            return page

        yield go


def row(page, name):
    return page.locator("#rows tr").filter(has=page.get_by_role("rowheader", name=name, exact=True))


def number(page, name, label):
    return row(page, name).locator(f"td[data-label='{label}']")


def do(page, words, name):
    """Press a button of a stream and confirm, by keyboard alone; the focus is where it was."""
    button = page.get_by_role("button", name=f"{words}: {name}", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#ask")).to_be_visible()
    expect(page.locator("#ask-head")).to_have_text(f"{words} {name}?")
    page.locator("#ask-yes").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#ask")).to_be_hidden()


def test_streams_are_shown_with_their_numbers_as_they_change(visit, server):
    page = visit(server.url)
    expect(page.locator("#summary")).to_contain_text("Model small, method tribe. 3 streams: 3 adapting")
    expect(page.locator("#connection")).to_have_text("Live.")
    with Client(server.url, "small") as client:
        for _ in range(3):
            client.predict("cam2", IMAGES)
        known = client.stream("cam2")
    expect(number(page, "cam2", "Distance")).to_have_text(f"{known['distance']:.3f}")
    expect(number(page, "cam2", "Entropy")).to_have_text(f"{known['entropy']:.3f}")
    expect(number(page, "cam2", "Trusted")).to_have_text(f"{100 * known['trusted']:.0f} %")
    page.get_by_role("button", name="cam2", exact=True).press("Enter")
    detail = page.locator("tr.detail")
    expect(detail).to_contain_text(f"Images learned from: {known['images']}")
    expect(detail.locator("svg path[d*=L]").first).to_be_attached()  # a line of at least two samples
    expect(detail.get_by_role("img")).to_have_count(4)
    assert "of cam2 over" in detail.get_by_role("img").first.get_attribute("aria-label")
    page.get_by_role("button", name="cam2", exact=True).press("Enter")
    expect(detail).to_have_count(0)


def test_the_version_of_each_stream_is_shown_where_there_is_more_than_one(visit):
    with serving(Opened(versions_of("1", "2"))) as server, Client(server.url, "small") as client:
        server.app.handlers.model = replace(server.app.handlers.model, versions=("1", "2"))
        page = visit(server.url)
        expect(row(page, "cam1").locator(".state")).to_have_text("adapting, version 1")
        client.control("move", "cam1", version="2")
        expect(row(page, "cam1").locator(".state")).to_have_text("adapting, version 2")
        expect(page.locator("#events")).to_contain_text("it moved from version 1 to version 2")


def test_buttons_freeze_roll_back_and_reset_after_confirmation(visit, server):
    page = visit(server.url, "phone")
    with Client(server.url, "small") as client:

        def known():
            return client.stream("cam1")

        back = page.get_by_role("button", name="Roll back: cam1")
        expect(back).to_be_disabled()
        page.get_by_role("button", name="Snapshot: cam1").press("Enter")
        expect(page.locator("#said")).to_have_text("cam1 has a new snapshot.")
        expect(back).to_be_enabled()
        before, generation = known()["clock"], known()["generation"]
        client.predict("cam1", IMAGES)
        assert known()["clock"] == before + 1
        back.click()
        page.keyboard.press("Escape")
        assert known()["clock"] == before + 1
        do(page, "Roll back", "cam1")
        expect(page.locator("#said")).to_have_text("cam1 is rolled back.")
        assert (known()["clock"], known()["generation"]) == (before, generation + 1)
        do(page, "Freeze", "cam1")
        expect(row(page, "cam1").locator(".state")).to_have_text("frozen")
        assert known()["frozen"] is True
        do(page, "Unfreeze", "cam1")
        expect(row(page, "cam1").locator(".state")).to_have_text("adapting")
        do(page, "Reset", "cam1")
        expect(page.locator("#said")).to_have_text("cam1 is the source model again.")
        assert (known()["clock"], known()["distance"]) == (0, 0)
        expect(page.locator("#events li").first).to_contain_text("cam1 returned to the source model")


def test_the_health_of_a_stream_is_shown_with_its_alarms(visit):
    net = small_network()
    fleet = tribe.fleet(net, guard=True, health=calibration_of(net, "tribe+guard"))
    with serving(Worker(fleet)) as server, Client(server.url, "small") as client:
        for _ in range(4):
            client.predict("door", pictures(1, 16)[0].numpy())
            client.predict("gate", pictures(1, 16)[0].numpy() * 0)
        page = visit(server.url, "phone")
        expect(row(page, "gate").locator(".alarms")).to_contain_text("black")
        expect(page.locator("#summary")).to_contain_text("with alarms")
        expect(page.locator("#events")).to_contain_text("the camera is black")
        expect(page.locator("#events")).to_contain_text("the guard lets it learn nothing from such frames")
        known = client.stream("door")
        low, high, accuracy = (round(100 * known[f"accuracy{end}"]) for end in ("_low", "_high", ""))
        expect(number(page, "door", "Accuracy")).to_have_text(f"{accuracy} % {low}–{high}")
        expect(row(page, "gate").locator(".state")).to_have_text("held by the guard")
        expect(page.locator("#summary")).to_contain_text("1 held by the guard")
        expect(page.locator("#rows tr").first).to_contain_text("gate")  # alarms come first
        page.get_by_role("button", name="gate", exact=True).click()
        expect(page.locator("tr.detail svg:visible")).to_have_count(5)
        expect(page.locator("tr.detail dl")).to_contain_text("with 90 % certainty from")
        expect(page.locator("tr.detail dl")).to_contain_text("Held back by the guard: 64 images")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0]


def test_the_last_frame_of_a_stream_is_shown_if_the_server_keeps_it(visit):
    with opened(tokens=[token("eyes", streams="cam", role="learn")], limits=Limits(thumbnails=2**20)) as server:
        with Client(server.url, "small", token="eyes") as client:
            client.predict("cam1", IMAGES)
        page = visit(server.url, expected=("401 (Unauthorized)",))
        page.get_by_label("Token").fill("eyes")
        page.keyboard.press("Enter")
        frame = page.get_by_role("img", name="Last frame of cam1")
        expect(frame).to_be_visible()
        assert frame.evaluate("async (e) => { await e.decode(); return [e.naturalWidth, e.naturalHeight]; }") == [8, 8]
        expect(page.get_by_role("img", name="Last frame of cam2")).to_have_count(0)  # no request came over HTTP


def test_a_name_is_text_wherever_it_stands_and_an_error_is_shown_in_words(visit, server):
    """The answer of the server is replaced here: it refuses such a name."""
    known = {"images": 5, "trusted": 0.5, "entropy": 0.25, "distance": 0.125, "frozen": False, "snapshots": []}
    answer = {"model": "small", "method": "tribe", "streams": [{**known, "name": STRANGE, "state": "learning"}]}
    answer["unlearned"] = 1234

    def prepare(page):
        body = json.dumps(answer)
        page.route("**/v1/streams", lambda route: route.fulfill(body=body, content_type="application/json"))

    page = visit(server.url, prepare=prepare, expected=("404 (Not Found)",))
    expect(page.get_by_role("rowheader", name=STRANGE, exact=True)).to_be_visible()
    expect(page.locator("#summary")).to_contain_text("Because of load, 1,234 images were predicted without learning.")
    do(page, "Freeze", STRANGE)
    expect(page.locator("#said")).to_contain_text(f"{STRANGE} was not changed: no path")
    page.get_by_role("button", name=STRANGE, exact=True).click()
    assert page.locator("main script").count() == 0
    assert page.locator("img[onerror], img[src=x]").count() == 0
    expect(page).to_have_title("1 stream - tribe")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_every_text_can_be_read(visit, server, tmp_path, size, scheme):
    page = visit(server.url, size, scheme)
    page.get_by_role("button", name=LONG, exact=True).click()
    expect(page.locator("tr.detail svg:visible")).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    found = page.evaluate(CONTRASTS)
    assert len(found) > 40
    assert [text for text in found if text[0] < 4.5] == []
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.parametrize("size", SIZES)
def test_the_keyboard_reaches_every_control_in_order_and_shows_where_it_is(visit, server, size):
    page = visit(server.url, size)
    page.get_by_role("button", name="Snapshot: cam2").wait_for()
    page.locator("#events li").first.wait_for()  # the list is one more stop
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("a[href], button, input, select, [tabindex='0']")]
            .filter((e) => e.checkVisibility({ visibilityProperty: true }) && !e.disabled)
            .map((e, i) => { e.dataset.stop = i; return e.dataset.stop; })"""
    )
    assert len(wanted) >= 18
    reached = []
    for _ in wanted:
        page.keyboard.press("Tab")
        focus = "document.activeElement"
        reached.append(page.evaluate(f"{focus}.dataset.stop"))
        assert page.evaluate(f"getComputedStyle({focus}).outlineStyle") == "solid"
    assert reached == wanted


def test_it_says_that_the_server_is_gone_and_goes_on_when_it_is_back(visit):
    with opened() as first:
        page = visit(first.url, expected=("ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY"))
        expect(page.locator("#events li")).to_have_count(3)
    expect(page.locator("#connection")).to_contain_text("The server has not answered since")
    expect(page.get_by_role("rowheader", name="cam1", exact=True)).to_be_visible()
    with opened(port=first.port) as second, Client(second.url, "small") as client:
        expect(page.locator("#connection")).to_have_text("Live.")
        client.control("freeze", "cam1")
        expect(row(page, "cam1").locator(".state")).to_have_text("frozen")
        expect(page.locator("#events")).to_contain_text("it only predicts")


def test_it_asks_for_a_token_and_keeps_it_nowhere(visit):
    with opened(tokens=[token("eyes", streams="cam", role="predict")]) as server:
        page = visit(server.url, expected=("401 (Unauthorized)", "403 (Forbidden)"))
        field = page.get_by_label("Token")
        expect(field).to_be_focused()
        for given, words in (
            ("with a space", "no spaces"),
            ("not-the-token-of-this-server", "does not know this token"),
        ):
            field.fill(given)
            page.keyboard.press("Enter")
            expect(page.locator("#login-words")).to_contain_text(words)
        field.fill("eyes")
        page.keyboard.press("Enter")
        expect(page.locator("#summary")).to_contain_text("2 streams")
        expect(page.locator("#events li")).to_have_count(2)
        do(page, "Reset", "cam1")
        expect(page.locator("#said")).to_contain_text("cam1 was not changed: the token 'eyes' has the role predict")
        kept = page.evaluate(
            "[document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage), location.href]"
        )
        assert kept == ["", "{}", "{}", f"{server.url}/"]
        page.reload()
        expect(field).to_be_visible()


@pytest.mark.parametrize("size", SIZES)
def test_an_admin_sees_what_every_token_uses_and_others_see_their_own(visit, size):
    eyes, other = (
        token("eyes", streams="cam", role="learn", most_streams=7),
        token("other", streams="x-", role="predict"),
    )
    with opened(tokens=[eyes, other, token("admin")]) as server:
        with Client(server.url, "small", token="eyes") as client:
            client.predict("cam1", IMAGES)
        for who, seen in (
            ("admin", ["admin (admin)", "eyes (learn, cam…)", "other (predict, x-…)"]),
            ("eyes", ["eyes (learn, cam…)"]),
        ):
            page = visit(server.url, size, expected=("401 (Unauthorized)",))
            expect(page.locator("#users")).to_be_hidden()
            page.get_by_label("Token").fill(who)
            page.keyboard.press("Enter")
            lines = page.locator("#user-rows tr")
            expect(lines).to_have_count(len(seen))
            assert sorted(lines.locator("th").all_inner_texts()) == seen
            line = lines.filter(has=page.get_by_role("rowheader", name="eyes (learn, cam…)"))
            expect(line.locator("td[data-label='Open streams']")).to_have_text("0 of 7")
            expect(line.locator("td[data-label='Learned from']")).to_have_text("2")
            expect(page.locator("#summary")).to_contain_text("At most 10,000 may be open.")
            assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
            assert [text for text in page.evaluate(CONTRASTS) if text[0] < 4.5] == []


def test_alarms_and_what_does_not_adapt_can_be_found_among_many(visit, server):
    """The answer of the server is replaced here: a worker of its own cannot be in all of these states at once."""
    base = {"images": 5, "trusted": 0.5, "entropy": 0.25, "distance": 0.125, "frozen": False, "snapshots": []}
    states = ("frozen", "followed", "unreachable", "lease", "lag")
    many = [{**base, "name": f"cam{i}", "state": "learning"} for i in range(60)]
    many += [{**base, "name": f"still-{state}", "state": state, "frozen": state == "frozen"} for state in states]
    many[3] |= {"alarms": [{"kind": "collapse", "words": "one class gets 98 % of the images"}, "dark"], "entropy": 0.75}

    def prepare(page):
        answer = json.dumps({"model": "small", "method": "tribe", "streams": many})
        page.route("**/v1/streams", lambda route: route.fulfill(body=answer, content_type="application/json"))

    page = visit(server.url, prepare=prepare)
    lines = page.locator("#rows tr")
    expect(lines).to_have_count(50)
    page.get_by_role("button", name="Show more (15 left)").click()
    expect(lines).to_have_count(65)
    expect(page).to_have_title("(1!) 65 streams - tribe")
    page.get_by_role("button", name="Entropy").click()
    expect(lines.first).to_contain_text("one class gets 98 % of the images; dark")
    expect(page.locator("th[data-sort=entropy]")).to_have_attribute("aria-sort", "descending")
    page.get_by_label("Show").select_option("still")
    shown = ["frozen", "not owned", "store unreachable", "lease ended", "storing is late"]
    expect(lines).to_have_count(5)
    assert sorted(page.locator(".state").all_inner_texts()) == sorted(shown)
    for state, changeable in zip(states, (True, False, False, False, True), strict=True):
        assert page.get_by_role("button", name=f"Reset: still-{state}").is_enabled() == changeable
    page.get_by_label("Name contains").fill("nothing like this")
    expect(page.locator("#empty")).to_have_text("No stream fits the choice above.")


def test_streams_in_shadow_are_seen_promoted_and_demoted(visit):
    """The page says who answers, how many answers differ, and both estimated accuracies."""
    net = small_network()
    fleet = tribe.fleet(net, "bn", health=calibration_of(net, "bn"), shadow=True)
    with serving(Worker(fleet)) as server, Client(server.url, "small") as client:
        for name in ("door", "gate"):
            client.predict(name, pictures(1, 16)[0].numpy())
        client.promote("gate")
        page = visit(server.url, "phone")
        expect(row(page, "door").locator(".shadow")).to_have_text("in shadow")
        expect(row(page, "gate").locator(".shadow")).to_be_hidden()
        expect(page.locator("#summary")).to_contain_text("1 in shadow")
        page.get_by_label("Show").select_option("shadow")
        expect(page.locator("#rows > tr:not(.detail)")).to_have_count(1)
        page.get_by_role("button", name="door", exact=True).click()
        facts = page.locator("tr.detail dl")
        expect(facts).to_contain_text("Answered by: the source model")
        known = client.stream("door")
        expect(facts).to_contain_text(f"Answers that differ from the source's: {round(100 * known['differ'])} %")
        expect(facts).to_contain_text("Estimated accuracy of the source: ")
        page.get_by_label("Show").select_option("all")
        do(page, "Promote", "door")
        expect(page.locator("#said")).to_have_text("door answers by what it has learned.")
        expect(facts).to_contain_text("Answered by: what adapts")
        assert not client.stream("door")["shadow"]
        do(page, "Demote", "gate")
        expect(row(page, "gate").locator(".shadow")).to_have_text("in shadow")
        assert client.stream("gate")["shadow"]
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0]


@pytest.mark.parametrize(("size", "tallest"), [("phone", 2800), ("desktop", 1900)])
def test_many_streams_are_small_rows_and_alarms_come_first(visit, server, size, tallest):
    """40 cameras took 5,400 pixels, and their alarms were somewhere among them. The answer is replaced here."""
    one = {"images": 5, "trusted": 0.5, "entropy": 0.25, "distance": 0.125, "frozen": False, "snapshots": [1]}
    one |= {"state": "learning", "accuracy": 0.75, "accuracy_low": 0.7, "accuracy_high": 0.8}
    many = [{**one, "name": f"line-{i // 8}-camera-{i % 8}"} for i in range(40)]
    many[5]["accuracy_familiar"] = False
    many[31] |= {"alarms": ["the camera is black"], "holding": True}

    def prepare(page):
        answer = json.dumps({"model": "small", "method": "tribe", "streams": many})
        page.route("**/v1/streams", lambda route: route.fulfill(body=answer, content_type="application/json"))

    page = visit(server.url, size, prepare=prepare)
    lines = page.locator("#rows tr")
    expect(lines).to_have_count(40)
    expect(lines.first).to_contain_text("line-3-camera-7")
    expect(lines.first.locator(".state")).to_have_text("held by the guard")
    expect(lines.filter(has_text="line-0-camera-5")).to_contain_text("not known")
    expect(page.locator("#rows .chart path[d^=M]").first).to_be_attached()  # the first sample is drawn
    tall, wide = page.evaluate("[document.documentElement.scrollHeight, document.documentElement.scrollWidth]")
    assert (tall < tallest, wide <= SIZES[size][0]) == (True, True), (tall, wide)
    cut = page.evaluate(
        "[...document.querySelectorAll('.name button')].filter((e) => e.scrollWidth > e.clientWidth).length"
    )
    assert cut == 0, "names are shown whole"
    toggle = page.get_by_role("button", name="line-0-camera-3", exact=True)
    toggle.click()
    expect(page.get_by_role("button", name="Reset: line-0-camera-3")).to_be_visible()
