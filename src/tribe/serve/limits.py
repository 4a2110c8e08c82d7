"""How much the server accepts of anybody."""

from dataclasses import dataclass

from tribe.fields import is_number, require, require_whole


@dataclass(frozen=True)
class Limits:
    """Bounds on requests and connections; what is beyond them is refused, and nobody else feels it."""

    body: int = 32 * 2**20  # bytes of a request, also when it is unpacked; states have a limit of their own
    state: int = 1024 * 2**20  # bytes of a state that is put to a stream
    pixels: int = 16_000_000  # of a picture, checked before it is decoded
    body_seconds: float = 20.0  # until a whole body must have arrived
    state_seconds: float = 600.0  # the same for a state
    head_seconds: float = 10.0  # until the first line and all headers of a request must have arrived
    head_bytes: int = 16 * 2**10  # of the first line and all headers
    idle_seconds: float = 75.0  # between two requests of a connection
    connections: int = 500  # open at the same time; one more is answered with 503 and closed
    thumbnails: int = 0  # bytes of the last frames of streams, which the page shows; 0: none is kept
    bodies: int = 1536 * 2**20  # bytes of bodies that are read or wait for an answer at the same time, of all clients

    def __post_init__(self) -> None:
        require_whole(self, "thumbnails", least=0)
        require_whole(self, "body", "state", "pixels", "head_bytes", "connections", "bodies")
        for name in ("body_seconds", "state_seconds", "head_seconds", "idle_seconds"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, f"{name} is a number of seconds, more than 0", value)
