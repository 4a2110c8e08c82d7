"""Stdout that is full or closed: a message on stderr and an exit status, never a traceback or a lost result."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("typer")

COMMANDS = {
    "text": ["--version"],
    "a table": ["list", "methods"],
    "JSON inside a block that catches errors": ["reproduce", "--list", "--format", "json"],
}


def tribe(arguments, **options):
    """Run the command to its end."""
    return subprocess.run([sys.executable, "-m", "tribe", *arguments], stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this platform has no /dev/full")
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_full_stdout_is_an_error(arguments):
    with open("/dev/full", "w") as full:
        ended = tribe(arguments, stdout=full)
    assert (ended.returncode, ended.stderr) == (2, "error: stdout could not be written: No space left on device\n")


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_closed_pipe_ends_the_command_quietly(arguments):
    read, write = os.pipe()
    os.close(read)
    ended = tribe(arguments, stdout=write)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_closed_stdout_is_an_error():
    ended = tribe(["list", "methods"], preexec_fn=lambda: os.close(1))
    assert (ended.returncode, ended.stderr) == (2, "error: stdout is closed: redirect it to a file, or to /dev/null\n")


def test_an_error_of_the_command_keeps_its_status():
    ended = tribe(["list", "nothing"], stdout=subprocess.DEVNULL)
    assert ended.returncode == 2
    assert "nothing" in ended.stderr
