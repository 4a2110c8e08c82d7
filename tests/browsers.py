"""A real chromium for tests of pages, and what they measure in it."""

import contextlib
import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the PATH: apt-get install chromium")

PATIENCE = 30_000  # milliseconds until a browser that does not do what is expected fails a test
SIZES = {"phone": (375, 812), "desktop": (1440, 900)}


@contextlib.contextmanager
def started_chromium():
    from playwright import sync_api

    sync_api.expect.set_options(timeout=PATIENCE)
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        yield started
        started.close()


@contextlib.contextmanager
def watched_pages(browser):
    """Yield a function that opens an empty page; a request to another place, and any complaint, fails the test.

    ``own``: how addresses that may be asked begin; ``complains``: which messages on the console count.
    """
    contexts, complaints = [], []

    def open_page(own, complains=lambda message: True, patience=None, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        if patience is not None:
            context.set_default_timeout(patience)
        page = context.new_page()
        page.on("request", lambda request: request.url.startswith(own) or complaints.append(request.url))
        page.on("console", lambda message: complaints.append(message.text) if complains(message) else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints, complaints


# Of every visible text: its colour and what is behind it, all tints laid over each other.
CONTRASTS = """() => {
  const parse = (words) => {
    const [r, g, b, a = 1] = words.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((value, i) => a * value + (1 - a) * under[i]);
  const ground = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.getClientRects().length) continue;
    if (["SCRIPT", "STYLE", "title", "desc"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const below = ground(element);
    const ink = over(parse(element instanceof SVGElement ? style.fill : style.color), below);
    const [high, low] = [light(ink), light(below)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), texts.currentNode.data.trim(), element.outerHTML.slice(0, 90)]);
  }
  return found;
}"""
