"""What the command says when it starts and stops: the truth about what is stored, and no password."""

import contextlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from http_calls import web

from commands import message, tribe_command
from processes import Prints, interrupted
from stores import RedisServer, need_redis
from tribe.serve.plain import encode_npy
from tribe.serve.store import StoreDown, open_store, shown_place

SECRET = "correct-horse"


@pytest.fixture
def redis():
    """A Redis server with a password, and its address with the password."""
    need_redis()
    server = RedisServer("--requirepass", SECRET)
    yield server, f"unix://:{SECRET}@{server.socket}"
    with contextlib.suppress(ProcessLookupError):
        server.remove()


@contextlib.contextmanager
def command(*options):
    """The command, once it listens: its process and its URL."""
    line = [sys.executable, "-m", "tribe", "serve", "--port", "0", "--set", "policy.write_every=1000", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, text=True, **pipes) as process:
        try:
            first = process.stdout.readline()
            yield process, re.search(r"http://\S+\d", first)[0]
        finally:
            process.kill()


def learn(url, *streams):
    for stream in streams:
        image = np.random.default_rng(0).random((1, 1, 28, 28), np.float32)
        answer = web.post(f"{url}/v1/streams/{stream}/predict", content=encode_npy(image))
        assert answer.status_code == 200, answer.text


def test_the_command_tells_which_streams_it_could_not_store(redis):
    """It said that every stream is stored, and exited with 0."""
    server, address = redis
    with command("--data", address, "--set", "policy.drain=1") as (process, url):
        learn(url, "cam1", "cam2")
        server.kill()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "every stream is stored" not in out
    last = " ".join(err.split()).rpartition("error: ")[2]
    assert "2 streams were not stored" in last
    assert "cam1" in last
    assert "cam2" in last
    assert SECRET not in out + err


def test_the_command_stores_every_stream_or_says_that_it_has_none(redis):
    _, address = redis
    with command("--data", address) as (process, url):
        learn(url, "cam1")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "stopped; every stream is stored\n"), err
    with contextlib.closing(open_store(address)) as store:
        assert (store.entry("cam1").clock, store.entry("cam1").held) == (1, False)


def test_no_password_is_shown_when_the_command_starts(redis):
    _, address = redis
    options = ("-m", "tribe", "serve", "--port", 0, "--data", address, "--verbose")
    result = interrupted(*options, when=Prints("Ctrl-C stops it"))
    assert result.code == 0, result.err
    assert "streams are in unix:///" in result.out
    assert SECRET not in result.out + result.err


@pytest.mark.parametrize(
    "address",
    [
        f"redis://:{SECRET}@127.0.0.1:1/0",
        f"redis://user:{SECRET}@127.0.0.1:1",
        f"redis://127.0.0.1:1/0?password={SECRET}&username=user",
        f"redis://:{SECRET}/{SECRET}@127.0.0.1:1",
        f"redis://:{SECRET}@{SECRET}#@127.0.0.1:1",
        f"redis://:{SECRET}",
        f"unix://:{SECRET}@/nowhere/socket",
        f"redis://[{SECRET}@127.0.0.1:1",
    ],
)
def test_no_password_is_in_an_error(address, nowhere):
    need_redis()
    assert SECRET not in shown_place(address)
    with pytest.raises((StoreDown, ValueError)) as caught:
        open_store(address)
    assert SECRET not in str(caught.value)
    result = tribe_command("serve", "--port", "0", "--data", address)
    assert result.exit_code == 2
    assert SECRET not in message(result)
