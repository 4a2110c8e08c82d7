"""Names that clients give: of streams and of requests. One rule for URLs, headers, files and metrics."""

import re
from typing import Any

from tribe.serve.protocol.errors import BadRequest

MOST_NAME = 128  # characters
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
MOST_ID = 256  # characters of the id of a request
RULE = f"1 to {MOST_NAME} of the characters A-Z a-z 0-9 . _ : @ - and begins with a letter or a digit"


def stream_name(value: Any, place: str = "the name of the stream") -> str:
    """A checked name of a stream; an integer is read as its decimal text.

    >>> stream_name("cam-1"), stream_name(7)
    ('cam-1', '7')
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or NAME.fullmatch(text) is None:
        shown = f"{text[:40]!r}{'...' if len(text) > 40 else ''}" if isinstance(text, str) else repr(value)[:60]
        raise BadRequest(f"{place} is {shown}; expected a name that has {RULE}")
    return text


def chosen_stream(parameter: Any, header: str | None) -> str | None:
    """The stream of a request: its parameter ``sequence_id`` or its header ``x-tribe-stream``.

    Clients of Triton send 0 or an empty text for no sequence.
    """
    named = None if parameter in (None, "", 0) and parameter is not False else stream_name(parameter, "sequence_id")
    other = None if header is None else stream_name(header, "the header x-tribe-stream")
    if named is not None and other is not None and named != other:
        raise BadRequest(
            f"sequence_id is {named!r} and the header x-tribe-stream is {other!r}; give one of them, or one name"
        )
    return named if named is not None else other


def request_id(value: Any) -> str | None:
    """A checked id of a request; None: it has none."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > MOST_ID or not value.isprintable():
        raise BadRequest(
            f"the id of the request is {str(value)[:40]!r}; expected at most {MOST_ID} printable characters"
        )
    return value
