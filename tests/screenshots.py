"""Take the pictures of the documents that show a page: ``make screenshots``. A real server, a real trial, chromium.

They are committed, in both schemes, because the repository shows the documents, too.
"""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import tribe
from browsers import started_chromium
from places import ROOT
from trials import digits, digits_network
from tribe.serve.client import Client
from tribe.serve.config import Limits
from tribe.trial.page import LabelServer, LabelSession
from tribe.trial.recordings import open_recording
from tribe.trial.replay import play

CAMERAS = {"hall": "", "gate-north": "spatter", "line-3": "motion_blur", "yard": "stripe"}  # and their corruption
METHOD = "tribe+watch"
BATCH, ROUNDS, LABELS = 16, 20, 12
SIZE = {"width": 1180, "height": 880}
COLOURS = 96  # of a picture: few, so that it is small


def main():
    with tempfile.TemporaryDirectory() as folder, started_chromium() as browser:
        take_server(browser, Path(folder))
        take_trial(browser, Path(folder))


def take_server(browser, folder):
    """Four cameras of digits, one of which goes black."""
    streams = {name: digits((("", 100), (corruption, 300)))[0] for name, corruption in CAMERAS.items()}
    streams["yard"][-4 * BATCH :] = 0
    limits = Limits(thumbnails=2**20)
    with tribe.serve.Server(digits_network(), METHOD, name="digits", data=folder, port=0, limits=limits) as server:
        pages = opened(browser, server.url)
        with Client(server.url, "digits") as client:
            for start in range(0, BATCH * ROUNDS, BATCH):
                for name, frames in streams.items():
                    client.predict(name, np.float32(frames[start - BATCH * ROUNDS :][:BATCH, None]) / 255)
                for page in pages.values():
                    page.wait_for_timeout(400)  # a sample of the charts
        for scheme, page in pages.items():
            page.get_by_role("button", name="line-3", exact=True).click()
            page.locator("tr.detail svg:visible").first.wait_for()
            save(page, "server", scheme)


def take_trial(browser, folder):
    """A trial after some labels."""
    frames, labels = digits((("", 200), ("stripe", 500)))
    np.save(folder / "day.npy", frames)
    recording = open_recording(folder / "day.npy", shape=(1, 28, 28))
    trial = play(recording, tribe.adapt(digits_network(), "bank+time"))
    first = trial.draw[:LABELS].tolist()
    session = LabelSession(trial, recording, folder / "labels.csv")
    with LabelServer(session) as server:
        (page,) = opened(browser, server.url, ("light",)).values()
        for frame in first:
            page.locator(f'#large[src="frames/{frame}.png"]').wait_for()
            choices = dict(reversed(text.split()) for text in page.locator("#candidates button").all_inner_texts())
            page.keyboard.press(choices.get(str(labels[frame]), "0"))
        page.locator("#progress", has_text=f"{LABELS} labels").wait_for()
        for scheme, page in opened(browser, server.url).items():
            save(page, "trial", scheme)


def opened(browser, url, schemes=("light", "dark")):
    """Open a page in some schemes."""
    pages = {}
    for scheme in schemes:
        pages[scheme] = browser.new_page(viewport=SIZE, color_scheme=scheme)
        pages[scheme].goto(url)
        pages[scheme].wait_for_timeout(1000)  # until what it shows at first has come
    return pages


def save(page, name, scheme):
    place = ROOT / "docs/pictures" / f"{name}{'' if scheme == 'light' else '.dark'}.png"
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    page.screenshot(path=place)
    Image.open(place).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(place, optimize=True)
    print(place.name, place.stat().st_size)


if __name__ == "__main__":
    main()
