"""The command line. typer and rich are optional dependencies: nothing in the library imports this package.

To add a command, put a file into `commands/`; `commands/doctor.py` is an example.
"""

import sys

from tribe.cli.stdout import checked_stdout

MISSING = "tribe's command line needs typer and rich: pip install 'tribe-tta[cli]'"


def main() -> None:
    """Entry point of the ``tribe`` command."""
    try:
        from tribe.cli.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(MISSING)
    from tribe.core.precision import keep_memory

    keep_memory()
    with checked_stdout():
        app(prog_name="tribe")
