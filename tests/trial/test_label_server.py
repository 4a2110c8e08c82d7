"""The server of the page of a trial: who may ask it, and what a label changes."""

import json
import zlib

import httpx
import numpy as np
import pytest
import torch

from trials import recorded, table
from tribe.trial.labels import read_labels
from tribe.trial.page import LabelServer, LabelSession, encode_png
from tribe.trial.trial import NEITHER

web = httpx.Client(timeout=60, trust_env=False)


@pytest.fixture
def session(tmp_path):
    recording = recorded(tmp_path)
    trial = table([0] * 24, [1] * 12 + [0] * 12, names=("cat", "dog", "<b>owl</b>", "bee"))
    return LabelSession(trial, recording, tmp_path / "labels.csv")


@pytest.fixture
def server(session):
    with LabelServer(session) as started:
        yield started


def post(server, place, body, **headers):
    sent = {"Content-Type": "application/json", **headers}
    return web.post(server.url + place, content=json.dumps(body), headers=sent)


def test_a_label_is_in_the_file_before_the_answer_and_undo_takes_it_back(server, session):
    first, second = session.trial.draw[:2].tolist()
    state = post(server, "label", {"frame": first, "label": 1}).json()
    assert state["next"]["frame"] == second
    assert (state["verdict"]["labels"], state["verdict"]["better"]) == (1, 1)
    assert read_labels(session.path, session.trial, session.recording) == {first: 1}
    post(server, "label", {"frame": second, "label": NEITHER})
    assert read_labels(session.path, session.trial, session.recording) == {first: 1, second: NEITHER}
    state = post(server, "undo", {}).json()
    assert state["next"]["frame"] == second
    assert read_labels(session.path, session.trial, session.recording) == {first: 1}
    post(server, "undo", {})
    assert post(server, "undo", {}).json()["counted"] == 0


@pytest.mark.parametrize(
    ("place", "body", "word"),
    [
        ("label", {"frame": 99, "label": 0}, "no frame 99"),
        ("label", {"frame": 0, "label": 4}, "no class 4"),
        ("label", {"frame": 20, "label": 0}, "both predict the same"),
        ("label", {"frame": "0", "label": 0}, "integer"),
        ("label", [], "object"),
    ],
)
def test_a_wrong_label_changes_nothing(server, session, place, body, word):
    answer = post(server, place, body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]
    assert session.trial.labels == {}
    assert not session.path.exists()


def test_only_the_address_with_the_token_on_this_machine_is_answered(server, session):
    assert server.url.startswith("http://127.0.0.1:")
    root = server.url.removesuffix(f"{server.token}/")
    own = root.removesuffix("/")
    for url, headers, status in (
        (server.url, {}, 200),
        (server.url, {"Host": root.removeprefix("http://").replace("127.0.0.1", "localhost").removesuffix("/")}, 200),
        (root, {}, 403),
        (root + "trial.json", {}, 403),
        (f"{root}wrong/trial.json", {}, 403),
        (server.url, {"Host": "evil.example"}, 421),
        (server.url, {"Host": "127.0.0.1.evil.example"}, 421),
        (server.url, {"Origin": "http://evil.example"}, 403),
        (server.url, {"Origin": own}, 200),
        (server.url + "../labels.csv", {}, 403),
        (server.url + "nothing", {}, 404),
        (server.url + "frames/99.png", {}, 404),
        (server.url + "frames/-1.png", {}, 404),
    ):
        answer = web.get(url, headers=headers)
        assert answer.status_code == status, url
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
    label = {"frame": int(session.trial.draw[0]), "label": 0}
    assert post(server, "label", label, Origin="http://evil.example").status_code == 403
    assert post(server, "label", label, **{"Content-Type": "text/plain"}).status_code == 415
    assert post(server, "label", {**label, "more": "x" * 5000}).status_code == 413
    assert session.trial.labels == {}


def test_a_picture_is_the_frame_and_large_ones_are_made_smaller(server, session):
    frame = session.recording.frame(3)
    for folder in ("frames", "thumbs"):
        answer = web.get(f"{server.url}{folder}/3.png")
        assert answer.headers["content-type"] == "image/png"
        assert answer.content == encode_png(frame)
    session.recording.frame = lambda index: torch.zeros(1, 500, 2000)
    content = web.get(f"{server.url}frames/3.png").content
    assert [int.from_bytes(content[i : i + 4]) for i in (16, 20)] == [960, 240]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_pixels(channels):
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (channels, 5, 7), dtype=np.uint8))
    content = encode_png(pixels)
    start = content.index(b"IDAT") + 4
    rows = np.frombuffer(zlib.decompressobj().decompress(content[start:]), np.uint8).reshape(5, 1 + 7 * channels)
    assert (rows[:, 0] == 0).all()
    assert rows[:, 1:].reshape(5, 7, channels).tolist() == pixels.permute(1, 2, 0).tolist()


def test_the_page_shows_at_first_what_the_trial_found(server, session):
    found = web.get(server.url + "trial.json").json()
    assert found["state"]["verdict"] == session.trial.verdict.json()
    assert (found["frames"], found["differing"]) == (24, 12)
    cards = web.get(server.url + "telling/0").json()
    assert [card["frame"] for card in cards["cards"]] == session.trial.telling.tolist()
    assert cards["left"] == 0
