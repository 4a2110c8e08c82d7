"""The page of a trial in a real browser: labels by keyboard until there is a verdict."""

import contextlib

import numpy as np
import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")

from playwright.sync_api import expect

import tribe
from browsers import CONTRASTS, PATIENCE, needs_chromium, watched_pages
from trials import digits, digits_network, recorded, table
from tribe.trial.labels import read_labels
from tribe.trial.page import LabelServer, LabelSession
from tribe.trial.recordings import open_recording
from tribe.trial.replay import play
from tribe.trial.trial import EstimatedAccuracy, EstimatedWindow

pytestmark = needs_chromium
WIDTHS = {"phone": (390, 844), "desktop": (1440, 900)}


@pytest.fixture
def host():
    """Start servers that outlive the pages of `visit`."""
    with contextlib.ExitStack() as stack:
        yield lambda session: stack.enter_context(LabelServer(session))


@pytest.fixture
def visit(browser, host):
    """Open a page; a request to another place, and any complaint of the browser, fails the test."""
    with watched_pages(browser) as open_page:

        def go(server, size="desktop", scheme="light"):
            width, height = WIDTHS[size]

            def complains(message):
                ended = ("ERR_CONNECTION", "ERR_EMPTY_RESPONSE")  # a page asks a server that the test has ended
                return message.type == "error" and not any(words in message.text for words in ended)

            looks = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
            page = open_page((server.url, "data:"), complains, PATIENCE, **looks)
            page.goto(server.url)
            expect(page.locator("#cards li").first).to_be_visible()
            return page

        yield go


@pytest.mark.slow
def test_thirty_labels_by_keyboard_lead_to_the_verdict(visit, host, tmp_path):
    frames, labels = digits((("", 100), ("stripe", 400)))
    np.save(tmp_path / "day.npy", frames)
    recording = open_recording(tmp_path / "day.npy", shape=(1, 28, 28))
    trial = play(recording, tribe.adapt(digits_network(), "bank+time"))
    session = LabelSession(trial, recording, tmp_path / "labels.csv")
    server = host(session)
    page = visit(server)
    expect(page.locator("#answer")).to_contain_text("will tell whether adapting helps")
    for i, frame in enumerate(trial.draw[:30].tolist()):
        expect(page.locator("#large")).to_have_attribute("src", f"frames/{frame}.png")
        choices = dict(reversed(text.split()) for text in page.locator("#candidates button").all_inner_texts())
        key = choices.get(str(labels[frame]), "0")
        if i == 5:  # a slip: another class, and back
            page.keyboard.press("9")
            expect(page.locator("#progress")).to_contain_text("6 labels")
            page.keyboard.press("Backspace")
            expect(page.locator("#large")).to_have_attribute("src", f"frames/{frame}.png")
        page.keyboard.press(key)
        expect(page.locator("#progress")).to_contain_text(f"{i + 1} label")
    expect(page.locator("#answer")).to_contain_text("Adapting helps by")
    assert page.locator("#answer").inner_text() == session.trial.verdict.headline
    kept = read_labels(session.path, trial, recording)
    assert len(kept) == 30
    assert session.trial.verdict == trial.labelled(kept).verdict
    page.reload()
    expect(page.locator("#answer")).to_contain_text("Adapting helps by")


def test_many_classes_are_searched_and_names_are_text(visit, host, tmp_path):
    names = ("<img src=x onerror=alert(1)>", *(f"class {k}" for k in range(1, 40)))
    trial = table([0] * 20, [1] * 20, classes=40, names=names)
    session = LabelSession(trial, recorded(tmp_path), tmp_path / "labels.csv")
    server = host(session)
    page = visit(server)
    first, second = trial.draw[:2].tolist()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("37")
    expect(page.locator("#matches li")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator("#progress")).to_contain_text("1 label")
    assert session.trial.labels == {first: 37}
    expect(page.locator("#search")).not_to_be_focused()
    page.get_by_role("button", name=names[0]).first.click()
    expect(page.locator("#progress")).to_contain_text("2 labels")
    assert session.trial.labels == {first: 37, second: 0}
    assert page.locator("main img[onerror]").count() == 0


def test_it_says_that_tribe_try_has_stopped(visit, tmp_path):
    session = LabelSession(table([0] * 5, [1] * 5), recorded(tmp_path), tmp_path / "labels.csv")
    with LabelServer(session) as server:
        page = visit(server)
    page.keyboard.press("1")
    expect(page.locator("#said")).to_contain_text("has stopped")


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_every_text_can_be_read(visit, host, tmp_path, size, scheme):
    window = EstimatedWindow(24, EstimatedAccuracy(0.7, 0.6, 0.8), EstimatedAccuracy(0.6, 0.5, 0.7))
    remarks = ("day.mp4 ends in the middle: 24 of 50 frames are there, up to 0:02.300; these were played",)
    trial = table([0] * 24, [1] * 12 + [0] * 12, windows=(window,), remarks=remarks)
    session = LabelSession(trial, recorded(tmp_path), tmp_path / "labels.csv")
    server = host(session)
    page = visit(server, size, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[size][0]
    found = page.evaluate(CONTRASTS)
    assert len(found) > 40
    assert [text for text in found if text[0] < 4.5] == []
    expect(page.locator("#facts")).to_contain_text("70.0 %")
    expect(page.locator("#remarks")).to_contain_text("ends in the middle")
