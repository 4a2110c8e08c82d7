"""Decode bodies in threads of their own, so that neither the event loop nor the requests of others wait for one."""

import asyncio
import os
import weakref
import zlib
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tribe.serve.errors import BadRequest, WrongType

T = TypeVar("T")

THREADS = max(4, min(8, os.cpu_count() or 4))  # one user has at most half of them
PIECE = 2**20  # bytes that are unpacked at a time
WINDOW_BITS = {"gzip": 31, "deflate": 15}  # of zlib


class Decoders:
    """Threads that decode requests and encode answers."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "tribe-decode")
        self._turns: weakref.WeakKeyDictionary[Hashable, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    async def run(self, user: Hashable, function: Callable[[], T]) -> T:
        """Run a function for a user, who waits while half of the threads work for the same user."""
        async with self._turns.setdefault(user, asyncio.Semaphore(THREADS // 2)):
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)


class Unpacker:
    """Unpacks a compressed body piece by piece, so that each can be counted before it exists."""

    def __init__(self, body: bytearray, encoding: str) -> None:
        if encoding not in WINDOW_BITS:
            raise WrongType(f"the body has the encoding {encoding[:40]!r}; expected gzip, deflate or none")
        self._encoding, self._zlib = encoding, zlib.decompressobj(WINDOW_BITS[encoding])
        self._body, self._read = memoryview(body), 0

    @property
    def done(self) -> bool:
        """Return whether all was unpacked."""
        return self._zlib.eof

    def read(self) -> bytes:
        """Return the next bytes, at most `PIECE`."""
        packed: bytes | memoryview = self._zlib.unconsumed_tail
        if not packed:
            packed = self._body[self._read : self._read + PIECE]
            self._read += len(packed)
        try:
            content = self._zlib.decompress(packed, PIECE)
        except zlib.error as error:
            raise BadRequest(f"the body is not {self._encoding}: {error}") from None
        if not packed and not content and not self.done:
            raise BadRequest(f"the body ends before its {self._encoding} data does: it was cut short")
        return content
