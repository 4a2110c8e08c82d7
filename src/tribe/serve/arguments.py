"""The bodies of control requests."""

from typing import Annotated

import msgspec

from tribe.serve.versions import Start


class NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a control request that takes no arguments."""


class RollbackArguments(NoArguments, forbid_unknown_fields=True):
    """The body of a rollback."""

    to: int | None = None  # the clock of a snapshot; None: the last one


class MoveArguments(NoArguments, forbid_unknown_fields=True):
    """The body of a move of a stream to another version."""

    version: str
    start: Start = "auto"


class ShareArguments(NoArguments, forbid_unknown_fields=True):
    """The body of a move of many streams to a version."""

    share: Annotated[float, msgspec.Meta(ge=0, le=1)]  # of all streams
    start: Start = "auto"


ARGUMENTS: dict[str, type[NoArguments]] = {"rollback": RollbackArguments, "move": MoveArguments}
