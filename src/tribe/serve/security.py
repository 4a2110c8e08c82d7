"""Tokens and rights: bearer tokens from a JSON file, each for the streams whose names begin in one way.

    {"tokens": [{"name": "line 3", "token": "...", "streams": "line3-", "role": "learn",
                 "most_streams": 20, "images_per_second": 100}]}

Quotas, all optional, bound what one token may ask for. Without them tokens share the server equally, see `fairness`.

``sha256`` (hexadecimal) may stand in place of ``token``, so that the file does not hold the secret. Each role includes
the one before it: predict, learn, admin. Without a file every client is an admin, which is why the server then listens
to this machine alone by default.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from tribe.serve.errors import FULL_AGAIN, Forbidden, NotFound, NoToken, TooMany, Unavailable
from tribe.serve.fairness import Shares

Role = Literal["predict", "learn", "admin"]
USED = {  # what is counted of each token -> the help text of tribe_token_NAME_total
    "requests": "Requests of a token.",
    "refused": "Requests of a token that were refused: the server is full, or a quota is used up.",
    "images": "Images of a token that were to be predicted.",
    "learned": "Images of a token that were learned from.",
}
RANK: Mapping[str, int] = {role: rank for rank, role in enumerate(get_args(Role))}
NEEDS: Mapping[str, Role] = {  # the least role for an action on a stream
    **dict.fromkeys(("predict", "see"), "predict"),
    **dict.fromkeys(("learn", "create", "end"), "learn"),
    **dict.fromkeys(("freeze", "unfreeze", "promote", "demote", "reset", "snapshot", "rollback", "drop"), "admin"),
    **dict.fromkeys(("move", "back"), "admin"),
    **dict.fromkeys(("get_state", "put_state"), "admin"),
}


@dataclass(frozen=True)
class Token:
    """The rights of a token."""

    name: str  # for logs; it is not secret
    digest: str  # SHA-256 of the token, hexadecimal
    streams: str = ""  # the beginning of the names of its streams; empty: all streams
    role: Role = "admin"
    most_streams: int | None = None  # that begin so; None: any number
    images_per_second: float | None = None  # to learn from; the others are only predicted. None: all
    predicted_images_per_second: float | None = None  # also those that are learned; None: any number, as below
    requests_per_second: float | None = None
    bytes_in_flight: int | None = None  # of its requests that are read or wait for an answer
    learning_share: float = 1.0  # of the steps, relative to other tokens that learn at the same time


class Rate:
    """An allowance of so many a second, of at most a second; None: any number.

    A request is never too large: it may lead into a debt, which later ones wait for.
    """

    def __init__(self, per_second: float | None, clock: Callable[[], float]) -> None:
        self.per_second, self._clock = per_second, clock
        self._balance, self._counted = per_second or 0.0, clock()

    def wait(self, count: int) -> float:
        """Take some, and return 0; or, if that is not permitted now, take nothing and return when it may be."""
        rate = self.per_second
        if rate is None:
            return 0.0
        now = self._clock()
        self._balance = min(self._balance + (now - self._counted) * rate, max(rate, 1.0))
        self._counted = now
        if rate <= 0 or self._balance <= 0:
            return min(3600.0, 1e-3 - self._balance / rate) if rate > 0 else 3600.0
        self._balance -= count
        return 0.0


class Principal:
    """A token in use, with what is left of its quotas and what it has used."""

    def __init__(self, token: Token, clock: Callable[[], float] = time.monotonic, alone: bool = True) -> None:
        self.alone = alone  # whether it shares the server with no other token
        self.used, self._clock = dict.fromkeys(USED, 0), clock
        self.change(token)

    def change(self, token: Token) -> None:
        """Give it other rights and quotas; what it has used stays."""
        self.token, clock = token, self._clock
        self.rights = {action for action, role in NEEDS.items() if RANK[token.role] >= RANK[role]}
        self._requests = Rate(token.requests_per_second, clock)
        self._images = Rate(token.predicted_images_per_second, clock)
        self._learned = Rate(token.images_per_second, clock)

    def can_access(self, stream: str) -> bool:
        """Return whether a stream is one of the token's."""
        return stream.startswith(self.token.streams)

    def check(self, action: str, stream: str) -> None:
        """Raise `Forbidden` if the token does not permit an action on a stream."""
        if not self.can_access(stream):
            raise Forbidden(
                f"the token {self.token.name!r} is for streams that begin with {self.token.streams!r}, not {stream!r}"
            )
        if action not in self.rights:
            raise Forbidden(
                f"the token {self.token.name!r} has the role {self.token.role}; {action.replace('_', ' ')} needs the "
                f"role {NEEDS[action]}"
            )

    def check_all(self, action: str) -> None:
        """Raise `Forbidden` if the token does not permit an action on all streams."""
        self.check(action, self.token.streams)
        if not self.sees_all:
            words = f"{action} of a version concerns all streams, and the token {self.token.name!r} is for those that"
            raise Forbidden(f"{words} begin with {self.token.streams!r}. It may {action} them one by one")

    @property
    def sees_all(self) -> bool:
        """Return whether it is an admin of all streams, who may also see the other tokens."""
        return not self.token.streams and self.token.role == "admin"

    @property
    def may_claim(self) -> bool:
        """Return whether a worker may claim streams for it: not for one that only predicts."""
        return "learn" in self.rights

    @property
    def is_limited(self) -> bool:
        """Return whether it may not create any number of streams."""
        return "create" not in self.rights or self.token.most_streams is not None

    def check_new(self, stream: str, count: Callable[[str], int]) -> None:
        """Raise if it may not create a stream; ``count`` returns how many names begin so."""
        if "create" not in self.rights:
            raise NotFound(f"no stream {stream!r}, and the token {self.token.name!r} may not create one")
        most = self.token.most_streams
        if most is not None and (number := count(self.token.streams)) >= most:
            words = f"the token {self.token.name!r} has {number} streams, as many as it may; delete one with"
            raise TooMany(f"{words} DELETE /v1/streams/NAME first", FULL_AGAIN)

    def may_learn(self, images: int) -> bool:
        """Return whether images may be learned from now, by the role and within the rate; if so, they count."""
        return "learn" in self.rights and not self._learned.wait(images)

    def count_request(self) -> None:
        """Count a request, or raise `TooMany`."""
        self.used["requests"] += 1
        self._take(self._requests, 1, "requests")

    def count_images(self, images: int) -> None:
        """Count images that are to be predicted, or raise `TooMany`."""
        self._take(self._images, images, "images")
        self.used["images"] += images

    def _take(self, rate: Rate, count: int, what: str) -> None:
        if wait := rate.wait(count):
            self.used["refused"] += 1
            words = f"the token {self.token.name!r} may send {rate.per_second:g} {what} a second"
            raise TooMany(f"{words}; try again in {wait:.3g} s", wait)

    def take(self, shares: Shares, count: int) -> int:
        """Take some of what users share, and return how much, or raise `Unavailable`."""
        try:
            return shares.take(self, count)
        except Unavailable:
            self.used["refused"] += 1
            raise

    def check_bytes(self, count: int) -> None:
        """Raise `TooMany` if its requests may not hold so many bytes at the same time."""
        if (most := self.token.bytes_in_flight) is not None and count > most:
            self.used["refused"] += 1
            raise TooMany(f"the requests of the token {self.token.name!r} may hold {most:,} bytes at the same time")


class Access:
    """The tokens of a server and the names of its host. Without tokens every client may do everything.

    ``file`` is where the tokens come from, if they come from a file: `reload` reads it again.
    """

    def __init__(
        self, tokens: Iterable[Token] = (), hosts: Iterable[str] = (), file: str | PathLike[str] | None = None
    ) -> None:
        given, self.file = list(tokens), file
        self._principals = {token.digest: Principal(token, alone=len(given) == 1) for token in given}
        self.users = tuple(self._principals.values())
        self._anyone = Principal(Token("everybody", ""))
        self._hosts = frozenset(host.lower() for host in hosts)  # names of this server; empty: any

    @property
    def is_open(self) -> bool:
        """Return whether there are no tokens."""
        return not self._principals

    def reload(self) -> str:
        """Read the file of tokens again, and return in words what changed. A wrong file changes nothing.

        Tokens that stay keep what they have used and their streams; requests that have begun end as they began.
        """
        if self.file is None:
            raise ValueError("the server was started without a file of tokens")
        before, given = self._principals, read_tokens(self.file)
        after = {token.digest: before.get(token.digest) or Principal(token) for token in given}
        for token in given:
            principal = after[token.digest]
            principal.alone = len(given) == 1
            if principal.token != token:
                principal.change(token)
        self._principals, self.users = after, tuple(after.values())
        new, gone = len(after.keys() - before.keys()), len(before.keys() - after.keys())
        return f"{len(after)} tokens, {new} of them new; {gone} are no longer valid"

    def has(self, user: Principal) -> bool:
        """Return whether a principal is still one of the server's."""
        return user in (self.users or (self._anyone,))

    def identify(self, authorization: str | None) -> Principal:
        """Return the principal of a header Authorization and count its request, or raise `NoToken` or `TooMany`."""
        principal = self._principal(authorization)
        principal.count_request()
        return principal

    def _principal(self, authorization: str | None) -> Principal:
        if not self._principals:
            return self._anyone
        if authorization is None:
            raise NoToken("this server needs a token: send the header Authorization: Bearer TOKEN")
        scheme, _, text = authorization.partition(" ")
        digest = hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).hexdigest()
        if scheme.lower() != "bearer" or digest not in self._principals:
            raise NoToken("the server does not know this token; expected the header Authorization: Bearer TOKEN")
        return self._principals[digest]

    def check_site(self, host: str, origin: str | None) -> None:
        """Raise `Forbidden` for a request that a page of another site made a browser send.

        A server without tokens trusts this machine, and so any page that a browser on this machine has open.
        """
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Forbidden(f"a page of {origin[:80]!r} sent this; only pages of this server may")
        name = (host[1:].partition("]") if host.startswith("[") else host.partition(":"))[0]  # without the port
        if self._hosts and name.lower() not in self._hosts:
            raise Forbidden(
                f"the header Host names {host[:80]!r}; expected {' or '.join(sorted(self._hosts))}. "
                "Give the server tokens, or its name as host_names (tribe serve --set server.host_names=NAME)"
            )


class TokenEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A token in the file."""

    name: str
    streams: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._:@-]{0,127})?$")]
    role: Role
    token: Annotated[str, Meta(pattern=r"^[!-~]{16,}$")] | None = None  # ASCII; a shorter one can be guessed
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] | None = None
    most_streams: Annotated[int, Meta(ge=0)] | None = None
    images_per_second: Annotated[float, Meta(ge=0)] | None = None
    predicted_images_per_second: Annotated[float, Meta(ge=0)] | None = None
    requests_per_second: Annotated[float, Meta(ge=0)] | None = None
    bytes_in_flight: Annotated[int, Meta(ge=0)] | None = None
    learning_share: Annotated[float, Meta(gt=0, le=1000)] = 1.0


class TokenFile(msgspec.Struct, forbid_unknown_fields=True):
    """The file of tokens."""

    tokens: list[TokenEntry]


def read_tokens(path: str | PathLike[str]) -> list[Token]:
    """Read a file of tokens; a ValueError says why it cannot be used."""
    try:
        entries = msgspec.json.decode(Path(path).read_bytes(), type=TokenFile).tokens
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}. See the section Security of docs/serving.md") from None
    if not entries:
        raise ValueError(f"{path} has no tokens; leave it out to let everybody do everything")
    tokens = []
    for entry in entries:
        if (entry.token is None) == (entry.sha256 is None):
            raise ValueError(f"{path}: the token {entry.name[:40]!r} needs either token or sha256")
        digest = entry.sha256 or hashlib.sha256((entry.token or "").encode()).hexdigest()
        facts = {name: getattr(entry, name) for name in entry.__struct_fields__ if name not in ("token", "sha256")}
        tokens.append(Token(digest=digest, **facts))
    if len({token.digest for token in tokens}) < len(tokens):
        raise ValueError(f"{path} has the same token twice; expected one entry for each token")
    return tokens
