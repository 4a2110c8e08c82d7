"""The `tribe` command called in this process, for tests."""

from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from tribe.cli.commands import load_app

app = load_app()


def tribe_command(*arguments):
    """Call it; what it did not turn into words is raised here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeeded(result):
    """Return the result of a command that must not fail."""
    assert result.exit_code == 0, result.output
    return result


def message(result):
    """What an error paragraph says, without line breaks."""
    return " ".join(result.stderr.split())


def assert_refused(result, *words):
    """Assert that a command ended with status 2 and a message that holds these words."""
    assert result.exit_code == 2, result.output
    for word in words:
        assert word in message(result)


def refused(result, *words):
    """Whether a command printed one line about an error on stderr, with these words, and nothing on stdout."""
    assert_refused(result, *words)
    assert result.stdout == ""
    stderr = result.stderr.removeprefix("loading\n")  # of the module of a model
    assert stderr.startswith("error: ")
    assert len(stderr.splitlines()) == 1
    return True


def write_method(name, before="", fields="", start="", folder="."):
    """Write a method that does something before each of its steps; return how `--methods` names it."""
    lines = "".join(f"        {line}\n" for line in before.splitlines())
    path = Path(folder, f"{name.lower()}.py")
    path.write_text(
        "import os, pathlib, signal\nfrom dataclasses import dataclass\nfrom tribe.methods.source import BN\n"
        f"{start}\n@dataclass(frozen=True)\nclass {name}(BN):\n    'Batch statistics again.'\n    {fields}\n"
        f"    def step(self, *given, **options):\n{lines}        return super().step(*given, **options)\n"
    )
    return f"{path}:{name}"
