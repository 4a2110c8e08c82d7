"""Frames of HTTP/2 over a socket, for clients that do with gRPC what no library of clients does."""

import contextlib
import re
import socket
import struct

DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
SERVICE = "/inference.GRPCInferenceService/"


def frame(kind, flags, stream, content=b""):
    """The bytes of a frame."""
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def packed(headers):
    """A list of headers as literals of HPACK, without a table and without Huffman's code."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)


def _text(text):
    raw = text if isinstance(text, bytes) else text.encode()
    if len(raw) < 127:
        return bytes((len(raw),)) + raw
    rest, size = len(raw) - 127, b"\x7f"
    while rest >= 128:
        size, rest = size + bytes((rest % 128 + 128,)), rest // 128
    return size + bytes((rest,)) + raw


def message(content, compressed=0):
    """A message of gRPC with the five bytes before it."""
    return struct.pack(">BI", compressed, len(content)) + content


class Connection:
    """A connection of HTTP/2 that sends what a test asks for, and answers settings and pings.

    `window` is the bytes of an answer that it takes, `allowed` the bytes that the server takes: of the
    connection (0) and of each of its calls.
    """

    def __init__(self, port, window=2**31 - 1):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = struct.pack(">HIHI", 1, 0, 4, window)  # no table of headers
        self.asked, self.acknowledged = 1, 0  # settings; the first are those of the beginning
        self.next, self.buffer, self.first, self.allowed = 1, b"", 2**16 - 1, {0: 2**16 - 1}
        self._write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def open(self, method, *headers, content=None, end=True):
        """Begin a call; `content` is the bytes of its messages, None: none follows yet. The number of its stream."""
        stream, self.next = self.next, self.next + 2
        self.allowed[stream] = self.first
        path = method if method[:1] in ("/", b"/") else SERVICE + method
        fixed = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        fixed += [("content-type", "application/grpc"), ("te", "trailers")]
        self._write(frame(HEADERS, END_HEADERS, stream, packed([*fixed, *headers])))
        if content is not None:
            self.send(stream, content, end)
        return stream

    def send(self, stream, content, end=False):
        """Send bytes of a call, as many as the server allows now; how many that are."""
        content = content[: max(0, min(self.allowed[0], self.allowed[stream]))]
        pieces = [content[i : i + 2**14] for i in range(0, len(content), 2**14)] or ([b""] if end else [])
        for i, piece in enumerate(pieces):
            self._write(frame(DATA, END_STREAM * (end and i == len(pieces) - 1), stream, piece))
        for each in (0, stream):
            self.allowed[each] -= len(content)
        return len(content)

    def read(self):
        """The next frame as (kind, flags, stream, content); None when the server has closed the connection."""
        head = self._bytes(9)
        content = None if head is None else self._bytes(int.from_bytes(head[:3], "big"))
        if head is None or content is None:
            return None
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
        if kind == WINDOW:
            self.allowed[stream] = self.allowed.get(stream, self.first) + int.from_bytes(content, "big")
        elif kind == SETTINGS and not flags & ACK:
            for i in range(0, len(content), 6):
                name, value = struct.unpack(">HI", content[i : i + 6])
                if name == 4:
                    for each in set(self.allowed) - {0}:
                        self.allowed[each] += value - self.first
                    self.first = value
        if kind in (SETTINGS, PING) and not flags & ACK:
            self._write(frame(kind, ACK, 0, content if kind == PING else b""))
        return kind, flags, stream, content

    def _write(self, content):
        with contextlib.suppress(ConnectionError):  # that it is closed is seen by who reads
            self.socket.sendall(content)

    def _bytes(self, count):
        while len(self.buffer) < count:
            try:
                more = self.socket.recv(2**16)
            except ConnectionError:
                return None
            if not more:
                return None
            self.buffer += more
        given, self.buffer = self.buffer[:count], self.buffer[count:]
        return given

    def settled(self):
        """Wait until the server has read all that was sent so far; false if it has closed the connection."""
        self._write(frame(SETTINGS, 0, 0))  # many pings would be refused
        while (given := self.read()) is not None:
            if given[0] == SETTINGS and given[1] & ACK:
                self.acknowledged += 1
                if self.acknowledged == self.asked + 1:
                    self.asked += 1
                    return True
        return False

    def status(self, stream):
        """Read until a call ends; its status of gRPC. None: the call was reset, or the connection was closed."""
        while (given := self.read()) is not None:
            kind, flags, number, content = given
            if number == stream and (kind == RST or (kind in (DATA, HEADERS) and flags & END_STREAM)):
                told = re.search(rb"grpc-status[\x01\x02](\d+)", content)
                return None if told is None else int(told[1])
        return None
