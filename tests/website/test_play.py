"""The page "Try it", in a real browser: what a visitor does and sees, and that it computes what Python computes."""

import base64
import functools
import gzip
import http.server
import json
import threading

import numpy as np
import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")
pytest.importorskip("mkdocs", reason="needs the extra docs: pip install '.[docs]'")
pytest.importorskip("onnxruntime", reason="needs the extra onnx: pip install '.[onnx]'")

from browsers import CONTRASTS, PATIENCE, needs_chromium, watched_pages
from tribe.onnx import Session
from website import playing

pytestmark = [
    pytest.mark.slow,  # builds the site
    needs_chromium,
    pytest.mark.skipif(playing.missing() != "", reason=f"needs {playing.missing()}: make extras"),
]
MOST_BYTES = 15_000_000
BATCH = 5  # as in page.js
READY = "#play[data-state=paused], #play[data-state=running]"


@pytest.fixture
def visit(browser, site):
    """Open the page as a file, paused; whatever it asks of a network or complains about fails the test."""
    with watched_pages(browser) as open_page:

        def go(width=1440, scheme="light", url=None):
            url = url or (site / "play.html").as_uri()
            own = (url.removesuffix("play.html"), "data:", "blob:")
            looks = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
            patience = 10 * PATIENCE  # hundreds of digits on a busy machine
            page = open_page(own, patience=patience, reduced_motion="reduce", **looks)  # it does not start
            page.goto(url)
            page.wait_for_selector(READY)
            page.select_option("#pace", "0")
            return page

        yield go


def seen(page):
    return int(page.get_attribute("#play", "data-seen"))


def run_until(page, count):
    """Run until so many digits have passed, and pause."""
    page.get_by_role("button", name="Start").or_(page.get_by_role("button", name="Go on")).click()
    page.wait_for_function(f"document.getElementById('play').dataset.seen >= {count}")
    page.get_by_role("button", name="Pause").click()
    page.wait_for_function("!tribePlay.busy")  # a batch may be on its way


def history(page):
    """The label and both predictions of each digit so far."""
    rows = page.evaluate("tribePlay.seen.map(({label, source, adapted}) => [label, source, adapted])")
    return np.array(rows).T


def keep_images(page):
    """Let the page hand over the images of each batch."""
    keep = "(images) => kept.push(btoa(String.fromCharCode(...images)))"
    page.evaluate(f"() => {{ globalThis.kept = []; tribePlay.onbatch = {keep}; }}")
    return lambda: np.frombuffer(b"".join(map(base64.b64decode, page.evaluate("kept"))), np.uint8).reshape(
        -1, 1, 28, 28
    )


def test_in_fog_the_adapting_error_ends_below_the_sources(visit):
    page = visit()
    page.get_by_role("button", name="Fog").click()
    run_until(page, 500)
    label, source, adapted = history(page)[:, :500]
    assert np.mean(source != label) > 0.6
    assert np.mean(adapted != label) < 0.3
    assert np.mean(adapted[400:] != label[400:]) < 0.15
    last = {name: float(page.inner_text(f"#{name}-now").split()[0]) for name in ("source", "adapted")}
    assert last["adapted"] < 15 < 60 < last["source"]


def test_the_browser_predicts_what_python_predicts(visit, site, tmp_path):
    """With a mix of corruptions, in bursts; the page's images go through the page's file in Python."""
    page = visit()
    images = keep_images(page)
    page.select_option("#order", "bursts")
    for name in ("Fog", "Noise", "Stripes"):
        page.get_by_role("button", name=name).click()
    page.select_option("#mix", "turns")
    run_until(page, 500)
    packed = json.loads((site / "play/files.js").read_text().removeprefix("const tribeFiles = ").rstrip(";\n"))
    (tmp_path / "digits.onnx").write_bytes(gzip.decompress(base64.b64decode(packed["model"])))
    session = Session(tmp_path / "digits.onnx", threads=1)
    x, (_, source, adapted) = images(), history(page)
    steps = [session.run(x[at : at + BATCH]) for at in range(0, len(x), BATCH)]
    assert len(x) == len(adapted) >= 500
    for name, predicted in (("logits", adapted), ("source_logits", source)):
        assert np.concatenate([step[name].argmax(1) for step in steps]).tolist() == predicted.tolist()
    assert np.mean(source != adapted) > 0.1


def test_a_reset_returns_to_the_training_and_plays_the_same_again(visit):
    page = visit()
    page.get_by_role("button", name="Bright light").click()
    run_until(page, 150)
    first = history(page)[:, :150]
    page.keyboard.press("r")
    page.wait_for_selector("#play[data-seen='0']")
    assert page.locator("#strip li").count() == 0
    assert "training 80 %" in page.get_attribute("#trust", "aria-label")  # the bonus of the source, and three speeds
    run_until(page, 150)
    assert history(page)[:, :150].tolist() == first.tolist()


def test_a_network_that_stops_learning_keeps_its_statistics(visit):
    page = visit()
    page.get_by_role("button", name="Low contrast").click()
    page.get_by_role("button", name="Stop learning").click()
    run_until(page, 60)
    assert page.get_attribute("#drift", "aria-label").endswith("0.00 standard deviations")
    label, source, adapted = history(page)
    assert source.tolist() == adapted.tolist() != label.tolist()
    page.get_by_role("button", name="Learn again").click()
    run_until(page, 120)
    assert not page.get_attribute("#drift", "aria-label").endswith("0.00 standard deviations")


def test_the_keyboard_alone_does_everything(visit):
    page = visit()
    chip = page.get_by_role("button", name="Fog")
    chip.focus()
    page.keyboard.press("Space")
    assert chip.get_attribute("aria-pressed") == "true"
    assert page.get_attribute("#play", "data-state") == "paused"  # space pressed the button, and nothing else
    page.focus("#severity")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#severity-shown") == "4 of 5"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Space")
    page.wait_for_function("document.getElementById('play').dataset.seen > 20")
    page.keyboard.press("Space")
    assert page.get_attribute("#play", "data-state") == "paused"
    assert page.evaluate("scrollY") == 0
    controls = "[...document.querySelectorAll('#play :is(button, select, input)')]"
    assert page.evaluate(f"{controls}.filter((e) => !(e.labels?.length || e.textContent.trim())).length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_fits_and_can_be_read(visit, width, scheme):
    page = visit(width, scheme)
    page.get_by_role("button", name="Noise").click()
    run_until(page, 40)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrasts = [entry for entry in page.evaluate(CONTRASTS) if "play-" in entry[2] or "strip" in entry[2]]
    assert contrasts
    assert [entry for entry in contrasts if entry[0] < 4.5] == []


def test_a_browser_that_cannot_run_it_is_told_so(browser, site):
    page = browser.new_page()
    page.add_init_script("delete globalThis.DecompressionStream")
    page.goto((site / "play.html").as_uri())
    page.wait_for_selector("#play[data-state=failed]")
    assert "DecompressionStream" in page.inner_text("#status")
    assert not page.is_visible("#run")
    page.close()


def test_it_is_small_and_a_server_can_serve_it(visit, site):
    class Handler(http.server.SimpleHTTPRequestHandler):
        served = 0

        def log_message(self, *_):
            pass

        def copyfile(self, source, target):
            data = source.read()
            Handler.served += len(data)
            target.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = visit(url=f"http://127.0.0.1:{server.server_port}/play.html")
        run_until(page, 10)
    finally:
        server.shutdown()
        server.server_close()
    assert 1_000_000 < Handler.served < MOST_BYTES
