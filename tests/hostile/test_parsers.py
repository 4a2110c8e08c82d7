"""zttp, which is young, reads what strangers send as h11 does, or refuses it: no request is two to a proxy."""

import random

import h11
import pytest
from http_calls import head, status
from small_server import listening

from tribe.serve.config import Limits

zttp = pytest.importorskip("zttp", reason="zttp is not installed: the extra serve-fast")
CASES = 20_000
REQUESTS = [
    b"GET /a?b=c HTTP/1.1\r\nHost: x\r\nX-A: 1\r\n\r\n",
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx-t: 1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\n\r\n"
    b"GET / HTTP/1.1\r\nHost: y\r\n\r\n",
]
PARTS = [
    *(b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b"0", b"-1", b"9" * 20, b"\x80\xff", b"HTTP/1.1", b"x" * 3000),
    *(b"Content-Length: 5\r\n", b"Content-Length: 6\r\n", b"Content-Length: +5\r\n", b"Host: q\r\n", b"f" * 16),
    *(b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"0x5\r\n"),
    b" HTTP/1.1\r\nHost: z\r\n\r\n",
]


def changed(draw):
    """A request that is nearly one."""
    content = bytearray(draw.choice(REQUESTS))
    for _ in range(draw.randrange(5)):
        at, kind = draw.randrange(len(content) + 1), draw.randrange(3)
        if kind == 0:
            content[at:at] = draw.choice(PARTS)
        elif kind == 1:
            del content[at : at + draw.randrange(6)]
        else:
            content[at : at + 1] = draw.randbytes(1)
    return bytes(content)


def pieces(content, draw):
    """The content as it may arrive."""
    while content:
        count = draw.randrange(1, len(content) + 1)
        yield content[:count]
        content = content[count:]


def plain(headers):
    """The headers beside those of the body's length, which h11 writes anew."""
    return {each for each in headers if each[0] not in (b"content-length", b"transfer-encoding")}


def by_h11(arriving):
    """What h11 makes of the first request: the method, the target, the headers and the body; None if not all."""
    connection, found, body = h11.Connection(h11.SERVER), None, b""
    try:
        for piece in arriving:
            connection.receive_data(piece)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    found = event.method, event.target, plain(event.headers)
                elif isinstance(event, h11.Data):
                    body += event.data
                else:
                    return *found, body
    except h11.RemoteProtocolError:
        pass
    return None


def by_zttp(arriving):
    """The same of zttp."""
    connection, found, body = zttp.Connection(zttp.SERVER), None, b""
    try:
        for piece in arriving:
            event = connection.receive_event(piece)
            while event is not zttp.NEED_DATA:
                if isinstance(event, zttp.Request):
                    found = event.method, event.target, plain(event.headers.to_list(lowercase_names=True))
                    if event.end_stream:
                        return *found, body
                elif isinstance(event, zttp.Data):
                    body += event.data
                else:
                    return *found, body
                event = connection.next_event()
    except zttp.RemoteProtocolError:
        pass
    return None


def test_both_parsers_see_the_same_request_or_none():
    draw, agreed = random.Random(0), 0
    for _ in range(CASES):
        arriving = list(pieces(changed(draw), draw))
        fast, sure = by_zttp(arriving), by_h11(arriving)
        if fast is None:
            continue  # it is the stricter one
        if sure is None:
            assert not fast[1].isascii(), arriving  # uvicorn refuses such a target
        else:
            assert fast == sure, arriving
            agreed += 1
    assert CASES // 10 < agreed < CASES


def test_a_target_that_is_not_ascii_is_refused():
    from test_front import connect

    with listening(limits=Limits(parser="zttp")) as server:
        for target in (b"/\xe0", b"\xff", b"/v2?\x80"):
            with connect(server.port) as client:
                client.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert client.recv(2**16)[9:12] in (b"", b"400", b"404", b"200")
        with connect(server.port) as client:
            client.sendall(head("GET /v2/health/live"))
            assert status(client.recv(2**16)) == 200
