"""The `tribe` command called in this process, for tests."""

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
