"""The last frames of streams: small, bounded, off by default, and for those who may see the stream."""

import io

import numpy as np
import pytest
import torch
from http_calls import IMAGES, refused, web
from PIL import Image
from small_server import listening, token

from tribe.serve.client import Client
from tribe.serve.config import Limits
from tribe.serve.service import SIDE, Thumbnails


def picture(kept, stream):
    with Image.open(io.BytesIO(kept.get(stream).encode())) as opened:
        return np.asarray(opened)


def test_a_frame_keeps_its_pixels_and_a_large_one_is_made_small():
    kept = Thumbnails(2**20)
    images = torch.rand(2, 3, 8, 8)
    kept.update_from("cam", images)
    assert np.array_equal(picture(kept, "cam"), (255 * images[1]).round().byte().permute(1, 2, 0).numpy())
    kept.update_from("cam", torch.full((1, 1, 1080, 1920), torch.nan))
    assert picture(kept, "cam").shape == (54, 96)
    assert max(picture(kept, "cam").shape) <= SIDE
    assert kept.get("cam").number == 2
    kept.update_from("cam", torch.rand(1, 5, 8, 8))
    assert kept.get("cam").number == 2, "five channels cannot be shown"


def test_the_bytes_are_bounded_and_the_oldest_frames_go_first():
    kept = Thumbnails(1000)  # five frames of 192 bytes
    for i in range(8):
        kept.update_from(f"cam{i}", torch.rand(1, 3, 8, 8))
        assert kept.bytes <= 1000
    assert [i for i in range(8) if kept.get(f"cam{i}") is not None] == [3, 4, 5, 6, 7]
    kept.update_from("cam3", torch.rand(1, 3, 8, 8))
    kept.update_from("cam8", torch.rand(1, 3, 8, 8))
    assert kept.get("cam4") is None
    assert kept.get("cam3") is not None
    kept.update_from("large", torch.rand(1, 3, 90, 90))
    assert kept.get("large") is None
    for i in range(9):
        kept.drop(f"cam{i}")
    assert kept.bytes == 0


@pytest.fixture(scope="module")
def showing():
    tokens = [token("line-3", streams="line3-", role="learn"), token("all")]
    with listening(tokens=tokens, limits=Limits(thumbnails=2**20)) as found:
        yield found


def get(server, path, token):
    return web.get(f"{server.url}/v1/streams/{path}", headers={"authorization": f"Bearer {token}"})


def test_it_is_the_last_frame_for_those_who_may_see_the_stream_until_the_stream_is_deleted(showing):
    with Client(showing.url, "small", token="all") as client:
        client.predict("line3-a", IMAGES)
        client.predict("line4-a", IMAGES)
        answer = get(showing, "line3-a/thumbnail", "line-3")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
        with Image.open(io.BytesIO(answer.content)) as opened:
            assert np.array_equal(np.asarray(opened), (255 * IMAGES[1]).round().astype(np.uint8).transpose(1, 2, 0))
        first = client.stream("line3-a")["thumbnail"]
        client.predict("line3-a", IMAGES[:1], learn=False)
        assert client.stream("line3-a")["thumbnail"] > first
        assert {each["name"] for each in client.streams() if "thumbnail" in each} == {"line3-a", "line4-a"}
        refused(get(showing, "line4-a/thumbnail", "line-3"), 403, "'line3-'")
        client.drop("line4-a")
        refused(get(showing, "line4-a/thumbnail", "all"), 404, "line4-a")
        web.put(f"{showing.url}/v1/streams/line4-a", headers={"authorization": "Bearer all"})
        refused(get(showing, "line4-a/thumbnail", "all"), 404, "no thumbnail")


def test_a_server_without_them_says_how_to_have_them(server):
    with Client(server.url, "small") as client:
        client.predict("cam1", IMAGES)
        assert "thumbnail" not in client.stream("cam1")
    refused(web.get(f"{server.url}/v1/streams/cam1/thumbnail"), 404, "limits.thumbnails")
