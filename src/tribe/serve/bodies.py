"""Read the body of a request: bounded in bytes and in time, with or without a Content-Length.

The bytes go straight into one array, placed so that the tensor that follows the JSON of a request is aligned in memory;
then it is used where it is, without a copy.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tribe.serve.protocol.errors import BadRequest, TooLarge, TooSlow, Unavailable, WrongType

Receive = Callable[[], Awaitable[Any]]
Bytes = NDArray[np.uint8]
ALIGNMENT = 64  # bytes
WINDOW = {"gzip": 31, "deflate": 15}  # of zlib


class Gone(Exception):
    """The client has closed the connection; nobody waits for an answer."""


class Budget:
    """How many bytes of bodies the server holds at the same time."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0

    @contextmanager
    def account(self) -> Iterator[Callable[[int], None]]:
        """A function that takes bytes from the budget, which get free when the block ends."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self.used + count > self.most:
                raise Unavailable(f"the server holds {self.used:,} bytes of other requests; try again")
            self.used += count
            taken += count

        try:
            yield take
        finally:
            self.used -= taken


class Body:
    """The body of one request, while it is read."""

    def __init__(self, receive: Receive, headers: dict[bytes, bytes], take: Callable[[int], None]) -> None:
        self._receive, self._headers, self._take = receive, headers, take
        self.complete = False  # everything has arrived

    async def read(self, most: int, seconds: float, aligned: int = 0) -> Bytes:
        """All bytes.

        Args:
            most: how many there may be.
            seconds: until all must have arrived.
            aligned: the place in the body that begins at an aligned address.
        """
        length = self._length(most)
        try:
            async with asyncio.timeout(seconds):
                content = await self._collect(most, length, -aligned % ALIGNMENT)
        except TimeoutError:
            raise TooSlow(
                f"the body did not arrive within {seconds:g} s; the connection is closed. Send it again"
            ) from None
        encoding = self._headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
        return content if encoding == "identity" else self._unpack(content, encoding, most)

    def _length(self, most: int) -> int | None:
        """The Content-Length, if there is one."""
        text = self._headers.get(b"content-length")
        if text is None:
            return None
        length = int(text)  # the parser of HTTP has checked it
        if length > most:
            raise TooLarge(f"the body has {length:,} bytes; expected {most:,} at most. Send fewer images at once")
        return length

    async def _collect(self, most: int, length: int | None, pad: int) -> Bytes:
        buffer = np.empty(pad + (2**16 if length is None else length), np.uint8)
        filled = pad
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise Gone
            if chunk := message.get("body"):
                self._take(len(chunk))
                end = filled + len(chunk)
                if end - pad > most:
                    raise TooLarge(f"the body has more than {most:,} bytes. Send fewer images at once")
                if end > len(buffer):
                    grown = np.empty(min(2 * end, pad + most), np.uint8)
                    grown[:filled] = buffer[:filled]
                    buffer = grown
                buffer[filled:end] = np.frombuffer(chunk, np.uint8)
                filled = end
            if not message.get("more_body", False):
                self.complete = True
                return buffer[pad:filled]

    async def client_gone(self) -> None:
        """Wait until the client closes the connection."""
        while (await self._receive())["type"] == "http.request":
            pass

    async def discard(self, most: int, seconds: float) -> None:
        """Read on for a moment and drop it, so that a client that still sends gets to read its answer."""
        try:
            async with asyncio.timeout(seconds):
                while most > 0:
                    message = await self._receive()
                    most -= len(message.get("body") or b"") + 1
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
        except TimeoutError:
            pass

    def _unpack(self, content: Bytes, encoding: str, most: int) -> Bytes:
        """The bytes of a compressed body, at most so many."""
        if encoding not in WINDOW:
            raise WrongType(f"the body has the encoding {encoding[:40]!r}; expected gzip, deflate or none")
        unpacker = zlib.decompressobj(WINDOW[encoding])
        try:
            found = unpacker.decompress(content.data, most + 1)
        except zlib.error as error:
            raise BadRequest(f"the body is not {encoding}: {error}") from None
        if len(found) > most:
            raise TooLarge(f"the body has more than {most:,} bytes when it is unpacked. Send fewer images at once")
        if not unpacker.eof:
            raise BadRequest(f"the body ends before its {encoding} data does: it was cut short")
        self._take(len(found))
        return np.frombuffer(bytearray(found), np.uint8)
