"""Stdout that is full or closed: a message on stderr and an exit status, never a traceback or a lost result."""

import os
import re
import subprocess
import sys

import pytest

from processes import ended

pytest.importorskip("typer")

COMMANDS = {
    "text": ["--version"],
    "a table": ["list", "methods"],
    "JSON inside a block that catches errors": ["reproduce", "--format", "json"],
}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this platform has no /dev/full")
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_full_stdout_is_an_error(arguments):
    with open("/dev/full", "w") as full:
        result = ended("-m", "tribe", *arguments, stdout=full)
    assert result.code in (1, 2)
    assert re.fullmatch("error: .*No space left on device\n", result.err)


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_closed_pipe_ends_the_command_quietly(arguments):
    read, write = os.pipe()
    os.close(read)
    result = ended("-m", "tribe", *arguments, stdout=write)
    os.close(write)
    assert (result.code, result.err) == (1, "")


def test_a_closed_stdout_is_an_error():
    """Python has no stdout then, from its start."""
    command = [sys.executable, "-m", "tribe", "list", "methods"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (1, "error: stdout is closed: redirect it to a file, or to /dev/null\n")


def test_an_error_of_the_command_keeps_its_status():
    result = ended("-m", "tribe", "list", "nothing")
    assert result.code == 2
    assert "nothing" in result.err
