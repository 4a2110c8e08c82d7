"""Tell systemd how a server does: ready, alive, stopping. Without systemd nothing is sent.

The protocol is a datagram to the socket that NOTIFY_SOCKET names (`man sd_notify`). A watchdog, WatchdogSec= of the
unit, ends a process that has not said for so long that it lives.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"
SHARE = 3  # messages in the time of the watchdog
log = logging.getLogger("tribe.serve")


def notify(message: str) -> bool:
    """Send a message, and return whether there is a systemd that takes it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@") or not hasattr(socket, "AF_UNIX"):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as to:
            to.setblocking(False)  # the event loop must not wait
            to.sendto(message.encode(), "\0" + address[1:] if address[0] == "@" else address)
    except OSError as error:
        log.warning("systemd did not get %s: %s", message, error)
        return False
    return True


def watchdog_seconds() -> float | None:
    """Return how long this process may say nothing; None without a watchdog."""
    micros, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or int(micros) == 0 or process not in ("", str(os.getpid())):
        return None
    return int(micros) / 1e6


@contextlib.asynccontextmanager
async def watched(alive: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Return a context in which systemd hears that the server lives, each time after ``alive`` has returned.

    If it never returns, or raises, systemd hears nothing more, and its watchdog ends the process.
    """
    seconds = watchdog_seconds()

    async def report() -> None:
        while seconds is not None:
            await alive()
            notify(ALIVE)
            await asyncio.sleep(seconds / SHARE)

    task = asyncio.get_running_loop().create_task(report())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
