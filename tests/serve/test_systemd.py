"""What systemd hears of a server, on a real socket: ready, alive as long as the model's threads answer, stopping."""

import asyncio
import os
import signal
import socket
import threading

import pytest
from small_server import small_fleet

from processes import Process
from tribe.serve import systemd
from tribe.serve.worker import Worker
from tribe.testing import images


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path, monkeypatch):
    """The socket of a systemd."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@tribe-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0", 1))
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield listening


def heard(manager):
    """What waits to be read."""
    manager.setblocking(False)
    try:
        return manager.recv(1000).decode()
    except BlockingIOError:
        return None
    finally:
        manager.setblocking(True)


def test_a_message_arrives(manager):
    assert systemd.notify(systemd.READY)
    assert heard(manager) == "READY=1"


@pytest.mark.parametrize("address", ["", "relative", "/none/of/these", "@nobody-listens-here"])
def test_without_a_systemd_nothing_is_said(address, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not systemd.notify(systemd.READY)


@pytest.mark.parametrize(
    ("micros", "process", "seconds"),
    [("3000000", None, 3.0), ("3000000", "1", None), ("0", None, None), ("soon", None, None), (None, None, None)],
)
def test_the_time_of_the_watchdog_is_read(micros, process, seconds, monkeypatch):
    for name, value in (("WATCHDOG_USEC", micros), ("WATCHDOG_PID", process)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert systemd.watchdog_seconds() == seconds


def test_it_lives_only_after_it_was_asked_and_has_answered(manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)

    async def play():
        asked, answer = asyncio.Event(), asyncio.Event()

        async def alive():
            asked.set()
            await answer.wait()

        async with systemd.watched(alive):
            await asked.wait()
            assert heard(manager) is None
            answer.set()
            for _ in range(3):
                assert await asyncio.to_thread(manager.recv, 1000) == b"WATCHDOG=1"

    asyncio.run(play())


def test_a_thread_that_hangs_is_not_alive(manager, monkeypatch):
    """The event loop still answers health checks then: only the threads of the model show it."""
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    hangs, hung = threading.Event(), threading.Event()

    def hang():
        hung.set()
        hangs.wait()

    async def play():
        worker = Worker(small_fleet())
        await worker.start()
        await worker.alive()
        stuck = worker.runtime.run("step", hang)
        await asyncio.to_thread(hung.wait)
        async with systemd.watched(worker.alive):
            for _ in range(3):
                await worker.infer(None, images(1, 2)[0])  # the source model predicts in another thread
            assert heard(manager) is None
            hangs.set()
            assert await asyncio.to_thread(manager.recv, 1000) == b"WATCHDOG=1"
        await stuck
        await worker.stop()
        await worker.alive()

    asyncio.run(play())


def test_a_server_says_that_it_is_ready_lives_and_stops(manager, tmp_path):
    told = {"NOTIFY_SOCKET": os.environ["NOTIFY_SOCKET"], "WATCHDOG_USEC": "30000"}
    process = Process("-m", "tribe", "serve", "--port", 0, "--data", tmp_path / "streams", env=told)
    messages = []
    while messages.count("WATCHDOG=1") < 3 or "READY=1" not in messages:
        messages.append(manager.recv(1000).decode())
    assert set(messages) == {"READY=1", "WATCHDOG=1"}
    os.kill(process.pid, signal.SIGTERM)
    while messages[-1] != "STOPPING=1":
        messages.append(manager.recv(1000).decode())
    assert process.end().code == 0
    assert messages.count("READY=1") == messages.count("STOPPING=1") == 1
