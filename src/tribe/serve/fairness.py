"""Divide what is limited between users: turns of the model, places in its queues, bytes, connections and streams.

A single user may have everything. A user is anything that can be a key, such as a `Principal`.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from tribe.serve.errors import Unavailable

J = TypeVar("J")


class Tally(dict[Hashable, int]):
    """Count something of each user; those with none of it are left out."""

    def add(self, user: Hashable, change: int) -> None:
        """Add to the count of a user."""
        self[user] = self.get(user, 0) + change
        if not self[user]:
            del self[user]

    def before(self, user: Hashable, amount: int) -> int:
        """Return how much is served before an amount that a user adds now, if all take turns.

        >>> Tally(a=100, b=3).before("b", 1), Tally(a=100, b=3).before("a", 1)
        (7, 103)
        """
        own = self.get(user, 0)
        return own + sum(min(count, own + amount) for other, count in self.items() if other != user)


class Turns(Generic[J]):
    """Order requests so that users who wait get equal shares, however many requests each of them sends.

    The level of a user is the sum of the costs that it was served. The lowest is next. A user who comes back begins
    at the lowest level of those who wait: time without requests is not saved up.
    """

    def __init__(self, user: Callable[[J], Hashable], cost: Callable[[J], float]) -> None:
        self._user, self._cost = user, cost
        self._levels: dict[Hashable, float] = {}  # those above the floor
        self._floor = 0.0

    def _level(self, user: Hashable) -> float:
        return max(self._levels.get(user, 0.0), self._floor)

    def order(self, jobs: Iterable[J]) -> list[J]:
        """Return requests in the order of their turns; those of one user stay in the given order."""
        lines: dict[Hashable, deque[J]] = {}
        for job in jobs:
            lines.setdefault(self._user(job), deque()).append(job)
        if len(lines) == 1:
            return list(next(iter(lines.values())))
        # Of users at the same level, the one with fewer requests is next.
        line_up = [(self._level(user), len(line), i, line) for i, (user, line) in enumerate(lines.items())]
        heapq.heapify(line_up)
        ordered = []
        while line_up:
            level, count, i, line = line_up[0]
            ordered.append(job := line.popleft())
            if line:
                heapq.heapreplace(line_up, (level + self._cost(job), count, i, line))
            else:
                heapq.heappop(line_up)
        return ordered

    def charge(self, served: Iterable[J], waiting: Collection[Hashable]) -> None:
        """Add the costs of requests that are served now; ``waiting`` are the users who go on waiting."""
        for job in served:
            user = self._user(job)
            self._levels[user] = self._level(user) + self._cost(job)
        highest = max(self._levels.values(), default=self._floor)
        self._floor = max(self._floor, min(map(self._level, waiting), default=highest))
        self._levels = {user: level for user, level in self._levels.items() if level > self._floor}


def fits_share(own: int, used: int, limit: int, alone: bool) -> bool:
    """Return whether a user may have ``own`` of a limit, of which all then use ``used``.

    One of several users may have twice what is left, so at most two thirds: the next user finds some.

    >>> [fits_share(own, own, 300, alone=False) for own in (200, 201)], fits_share(60, 260, 300, alone=False)
    ([True, False], True)
    """
    return used <= limit and (alone or own <= 2 * (limit - used))


class Shares:
    """Places that requests take and give back, such as bytes: ``limit`` in all, a share of them for each user.

    ``alone``: there is one user, who may have them all. ``full`` are the words of a refusal.
    """

    def __init__(self, limit: int, full: str, alone: bool = True) -> None:
        self.limit, self.alone, self._full = limit, alone, full
        self.used, self.of = 0, Tally()

    def take(self, user: Hashable, count: int) -> int:
        """Count what a user takes, and return it; refuse what is beyond its share: `Unavailable`.

        A user that is None stands for several, and may have what is left.
        """
        alone = self.alone or user is None
        if not fits_share(self.of.get(user, 0) + count, self.used + count, self.limit, alone):
            raise Unavailable(self._full.format(used=self.used, own=self.of.get(user, 0), limit=self.limit))
        self.add(user, count)
        return count

    def add(self, user: Hashable, change: int) -> None:
        """Count a change that is not refused, such as what a user gives back."""
        self.used += change
        self.of.add(user, change)

    @contextmanager
    def hold(self, user: Hashable, count: int) -> Iterator[None]:
        """Take places until the block ends."""
        self.take(user, count)
        try:
            yield
        finally:
            self.add(user, -count)
