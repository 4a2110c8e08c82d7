"""Names of streams and ids of requests.

A stream of a fleet may have any name. One that is served has a name that fits into URLs, headers, files and metrics.
"""

import hashlib
import re
from typing import Any

MAX_NAME = 128  # characters of a stream's name
MAX_REQUEST_ID = 256  # characters of the id of a request
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@-]{{0,{MAX_NAME - 1}}}")
NAME_RULE = f"1 to {MAX_NAME} of the characters A-Z a-z 0-9 . _ : @ - and begins with a letter or a digit"


class WrongName(ValueError):
    """A name of a stream or an id of a request that breaks the rule."""


def check_stream_name(name: Any, noun: str = "the name of the stream") -> str:
    """Return the name of a stream, or raise a `WrongName` that states the rule.

    >>> check_stream_name("cam-1")
    'cam-1'
    """
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        shown = f"{name[:40]!r}{'...' if len(name) > 40 else ''}" if isinstance(name, str) else repr(name)[:60]
        raise WrongName(f"{noun} is {shown}; expected a name that has {NAME_RULE}")
    return name


def check_request_id(request_id: Any) -> str:
    """Return the id of a request, or raise a `WrongName` that states the rule."""
    if not isinstance(request_id, str) or len(request_id) > MAX_REQUEST_ID or not request_id.isprintable():
        raise WrongName(
            f"the id of the request is {str(request_id)[:40]!r}; expected at most {MAX_REQUEST_ID} printable characters"
        )
    return request_id


class UnknownStream(LookupError):
    """A stream of this name does not exist; ``others`` is what to say of those that do, to who may know them."""

    def __init__(self, words: str, others: str = "") -> None:
        super().__init__(words + others)
        self.public = words


def check_name(name: Any) -> None:
    """Raise if the name of a stream is not a text, or is empty."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a stream is a text; got {name!r}")
    if not name:
        raise ValueError("the name of a stream is empty; expected at least one character")


def stream_seed(name: str, seed: int = 0) -> int:
    """Return the seed of a stream: a hash (BLAKE2b) of the fleet's seed and the stream's name, from 0 to 2**62 - 1.

    So it depends neither on the order in which streams are added nor on the process.

    >>> stream_seed("cam1") == stream_seed("cam1"), stream_seed("cam1") == stream_seed("cam2")
    (True, False)
    """
    text = f"{int(seed)}\n{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2
