"""Bodies that unpack or decode to far more than they weigh: counted before they exist, and in nobody else's way."""

import asyncio
import threading
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from http_calls import IMAGES, infer, picture, refused, web
from small_server import listening

from tribe.serve.app import Bodies
from tribe.serve.config import Limits
from tribe.serve.decoding import PIECE, THREADS, Decoders, Unpacker
from tribe.serve.errors import BadRequest, TooLarge, Unavailable
from tribe.serve.plain import encode_npy
from tribe.serve.security import Principal, Token

MEGABYTES = 32
BOMB = zlib.compress(bytes(MEGABYTES * 2**20), 9)  # 32 kB


def new_user():
    """Somebody whose requests are decoded."""
    return Principal(Token("user", ""))


def posted(content, encoding="deflate"):
    """A request as `Bodies` reads it."""

    async def stream():
        yield content

    return SimpleNamespace(headers={"content-encoding": encoding}, stream=stream, user=new_user())


async def unpacked(bodies, content, limit=MEGABYTES * 2**20, then=lambda body: len(body)):
    async with bodies.read(posted(content), limit, 60.0) as body:
        return then(body)


def test_the_event_loop_goes_on_while_a_bomb_is_unpacked():
    """Callbacks of the loop are counted, not seconds: at least one runs between any two pieces."""

    async def count():
        turns, bodies = 0, Bodies(2**30, Decoders())
        task = asyncio.create_task(unpacked(bodies, BOMB))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        assert await task == MEGABYTES * 2**20
        assert bodies.used == 0
        return turns

    assert asyncio.run(count()) > MEGABYTES


def test_what_is_unpacked_counts_before_it_exists(monkeypatch):
    """Forty-eight bombs at the same time took 1,536 MB, whatever the limit was."""
    made, counts, read = [], [], Unpacker.read

    def counted(unpacker):
        counts.append(bodies.used)
        made.append(len(read(unpacker)))
        return bytes(made[-1])

    monkeypatch.setattr(Unpacker, "read", counted)
    bodies = Bodies(2**30, Decoders())
    asyncio.run(unpacked(bodies, BOMB))
    assert sum(made) == MEGABYTES * 2**20
    assert all(count >= sum(made[:i]) + PIECE for i, count in enumerate(counts))

    async def attack():
        return await asyncio.gather(*(unpacked(bodies, BOMB) for _ in range(48)), return_exceptions=True)

    bodies = Bodies(100 * 2**20, Decoders())
    refusals = [each for each in asyncio.run(attack()) if isinstance(each, Unavailable)]
    assert len(refusals) >= 45
    assert max(counts) <= 2**30
    assert bodies.used == 0


def test_unpacked_bytes_are_those_that_were_packed():
    draw = np.random.default_rng(0)
    for content in (b"", b"x", draw.bytes(3 * PIECE + 1), bytes(5 * PIECE), draw.bytes(PIECE)):
        for level in (0, 1, 9):
            packed = zlib.compress(content, level)
            assert asyncio.run(unpacked(Bodies(2**30, Decoders()), packed, then=bytes)) == content
            for cut in (1, 5, len(packed) // 2):
                with pytest.raises(BadRequest, match="cut short"):
                    asyncio.run(unpacked(Bodies(2**30, Decoders()), packed[:-cut]))
    with pytest.raises(TooLarge, match="unpacked"):
        asyncio.run(unpacked(Bodies(2**30, Decoders()), BOMB, limit=2**20))


def test_one_client_cannot_take_all_threads_that_decode():
    """Its slow decodes filled the threads that all requests shared."""

    async def attack():
        decoders, go, greedy = Decoders(), threading.Event(), new_user()
        slow = [asyncio.create_task(decoders.run(greedy, go.wait)) for _ in range(10 * THREADS)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(30):
                assert await decoders.run(new_user(), lambda: "answered") == "answered"
        finally:
            go.set()
        await asyncio.gather(*slow)

    asyncio.run(attack())


def test_requests_are_decoded_while_the_shared_threads_are_busy(monkeypatch):
    """A large state is copied there."""

    async def busy(*_):
        raise AssertionError("no thread is free")

    with listening() as server:
        monkeypatch.setattr(asyncio, "to_thread", busy)
        many = np.zeros((1000, 3, 8, 8), np.float32)
        assert infer(server, many).status_code == 200
        packed = {"content-encoding": "deflate"}
        for content, headers in ((encode_npy(many), {}), (zlib.compress(encode_npy(IMAGES)), packed)):
            answer = web.post(f"{server.url}/v1/predict", content=content, headers=headers)
            assert answer.status_code == 200


def test_images_count_as_long_as_their_request_waits():
    """A picture of one colour weighs a fiftieth of its pixels."""
    content = picture(size=(8, 8))[0]
    with listening(limits=Limits(bodies=len(content) + 3 * 64 * 4 - 1)) as server:
        refused(web.post(f"{server.url}/v1/predict", content=content), 503, "other requests")
        assert server.app.handlers.bodies.used == 0
    with listening(limits=Limits(bodies=len(content) + 3 * 64 * 4)) as server:
        assert web.post(f"{server.url}/v1/predict", content=content).status_code == 200
        assert server.app.handlers.bodies.used == 0
