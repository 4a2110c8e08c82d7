"""Who may do what: bearer tokens from a JSON file, each for the streams whose names begin in one way.

    {"tokens": [{"name": "line 3", "token": "...", "streams": "line3-", "role": "learn",
                 "most_streams": 20, "images_per_second": 100}]}

``sha256`` (hexadecimal) may stand in place of ``token``, so that the file holds no secret. Roles, each with all that
the one before it may do: predict, learn, admin. Without a file everybody is admin, which is why the server then
listens to this machine alone by default.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, get_args

from tribe.fields import is_number, is_whole, require
from tribe.io import json_files
from tribe.io.json_files import Where
from tribe.serve.protocol.errors import Forbidden, NoToken
from tribe.serve.protocol.names import NAME

Role = Literal["predict", "learn", "admin"]
RANK: Mapping[str, int] = {role: rank for rank, role in enumerate(get_args(Role))}
NEEDS: Mapping[str, Role] = {  # the least role for an action on a stream
    "predict": "predict",
    "see": "predict",
    "learn": "learn",
    "create": "learn",
    "end": "learn",
    "freeze": "admin",
    "unfreeze": "admin",
    "reset": "admin",
    "snapshot": "admin",
    "rollback": "admin",
    "drop": "admin",
    "get_state": "admin",
    "put_state": "admin",
}
SHORTEST = 16  # characters of a token: a shorter one can be guessed
ENTRY = {
    "name": str,
    "token?": Where(str, lambda text: len(text) >= SHORTEST and text.isascii(), f"{SHORTEST} or more ASCII characters"),
    "sha256?": Where(
        str, lambda text: len(text) == 64 and set(text) <= set("0123456789abcdef"), "64 hexadecimal digits"
    ),
    "streams": Where(
        str, lambda text: text == "" or NAME.fullmatch(text) is not None, "the beginning of names of streams"
    ),
    "role": set(get_args(Role)),
    "most_streams?": (int, None),
    "images_per_second?": (float, None),
}


@dataclass(frozen=True)
class Token:
    """What the holder of a token may do."""

    name: str  # for logs; it is no secret
    digest: str  # SHA-256 of the token, hexadecimal
    streams: str = ""  # how names of its streams begin; empty: all streams
    role: Role = "admin"
    most_streams: int | None = None  # that begin so; None: any number
    images_per_second: float | None = None  # to learn from; the others are only predicted. None: all

    def __post_init__(self) -> None:
        require(self.role in RANK, f"role is one of {', '.join(RANK)}", self.role)
        most, rate = self.most_streams, self.images_per_second
        require(most is None or is_whole(most, least=0), "most_streams is a whole number, at least 0", most)
        require(rate is None or (is_number(rate) and rate >= 0), "images_per_second is a number, at least 0", rate)


@dataclass
class Holder:
    """A token in use: it counts the images that were learned from."""

    token: Token
    clock: Callable[[], float] = time.monotonic
    _balance: float = field(default=0.0, init=False)  # images that may be learned from now; below zero: a debt
    _counted: float = field(default=0.0, init=False)  # the time of the balance

    def __post_init__(self) -> None:
        self._balance, self._counted = self.token.images_per_second or 0.0, self.clock()

    def can(self, action: str) -> bool:
        """Whether the role permits an action."""
        return RANK[self.token.role] >= RANK[NEEDS[action]]

    def sees(self, stream: str) -> bool:
        """Whether a stream is one of the token's."""
        return stream.startswith(self.token.streams)

    def check(self, action: str, stream: str) -> None:
        """Refuse an action on a stream that the token does not permit."""
        if not self.sees(stream):
            raise Forbidden(
                f"the token {self.token.name!r} is for streams that begin with {self.token.streams!r}, not {stream!r}"
            )
        if not self.can(action):
            raise Forbidden(
                f"the token {self.token.name!r} has the role {self.token.role}; {action.replace('_', ' ')} needs the "
                f"role {NEEDS[action]}"
            )

    def check_all(self, what: str) -> None:
        """Refuse what shows all streams to a token for some of them."""
        if self.token.streams:
            raise Forbidden(f"the token {self.token.name!r} is for some streams; {what} needs one for all streams")

    def may_learn(self, images: int) -> bool:
        """Whether images may be learned from now, within the rate; if so, they count.

        A batch is never too large: it may lead into a debt, which later ones wait for.
        """
        rate = self.token.images_per_second
        if rate is None:
            return True
        now = self.clock()
        self._balance = min(self._balance + (now - self._counted) * rate, max(rate, 1.0))
        self._counted = now
        if rate <= 0 or self._balance <= 0:
            return False
        self._balance -= images
        return True


class Access:
    """Finds the holder of a token. Without tokens everybody may do everything."""

    def __init__(self, tokens: Iterable[Token] = (), hosts: Iterable[str] = ()) -> None:
        self._holders = {token.digest: Holder(token) for token in tokens}
        self.everybody = Holder(Token("everybody", ""))
        self.hosts = frozenset(host.lower() for host in hosts)  # names of this server; empty: any

    @property
    def is_open(self) -> bool:
        """Whether there are no tokens."""
        return not self._holders

    def identify(self, authorization: str | None) -> Holder:
        """The holder of the token in a header Authorization, or an error."""
        if not self._holders:
            return self.everybody
        if authorization is None:
            raise NoToken("this server needs a token: send the header Authorization: Bearer TOKEN")
        scheme, _, text = authorization.partition(" ")
        digest = hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).hexdigest()
        if scheme.lower() != "bearer" or digest not in self._holders:
            raise NoToken("the server does not know this token; expected the header Authorization: Bearer TOKEN")
        return self._holders[digest]

    def check_site(self, host: str | None, origin: str | None) -> None:
        """Refuse what a page of another site makes a browser send, and a name that only such a page gives this server.

        A server without tokens trusts this machine, and so any page that a browser on this machine has open.
        """
        if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
            raise Forbidden(f"a page of {origin[:80]!r} sent this; only pages of this server may")
        if self.hosts and _name_of(host or "") not in self.hosts:
            raise Forbidden(
                f"the header Host names {(host or '')[:80]!r}; expected {' or '.join(sorted(self.hosts))}. "
                "Give the server tokens, or its name as --host-name, to use it under another"
            )


def _name_of(host: str) -> str:
    """The name in a header Host, without the port.

    >>> _name_of("[::1]:8000"), _name_of("localhost:8000"), _name_of("LOCALHOST")
    ('::1', 'localhost', 'localhost')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def read_tokens(path: str | PathLike[str]) -> list[Token]:
    """Read a file of tokens, or say why it cannot be used."""
    advice = "See the section Security of docs/serving.md"
    found = json_files.read(path, {"tokens": [ENTRY]}, advice)["tokens"]
    tokens = [_token(str(path), entry) for entry in found]
    if not tokens:
        raise ValueError(
            f"{path} has no tokens, so nobody could do anything; leave it out to let everybody do everything"
        )
    if len({token.digest for token in tokens}) < len(tokens):
        raise ValueError(f"{path} has the same token twice; expected one entry for each token")
    return tokens


def _token(place: str, entry: Mapping[str, Any]) -> Token:
    if unknown := sorted(entry.keys() - {name.removesuffix("?") for name in ENTRY}):
        raise ValueError(f"{place}: the token {entry['name'][:40]!r} has an unknown entry {unknown[0][:40]!r}")
    if ("token" in entry) == ("sha256" in entry):
        raise ValueError(f"{place}: the token {entry['name'][:40]!r} needs either token or sha256")
    digest = entry["sha256"] if "sha256" in entry else hashlib.sha256(entry["token"].encode()).hexdigest()
    limits = {name: entry.get(name) for name in ("most_streams", "images_per_second")}
    return Token(entry["name"], digest, entry["streams"], entry["role"], **limits)
