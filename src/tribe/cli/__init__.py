"""The command line. typer and rich are optional dependencies: nothing in the library imports this package.

To add a command, put a file into `commands/`; `commands/doctor.py` is an example.
"""

import os
import sys

MISSING = "tribe's command line needs typer and rich: pip install 'tribe-tta[cli]'"
CLOSED_PIPE = 1  # the exit status, as click and rich have it


def main() -> None:
    """Entry point of the ``tribe`` command."""
    if sys.stdout is None:  # the next file that is opened would get its number, and what C code prints
        sys.exit("error: stdout is closed: redirect it to a file, or to /dev/null")
    try:
        from tribe.cli.commands import load_app

        app = load_app(sys.argv[1] if len(sys.argv) > 1 else None)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(MISSING)
    from tribe.core.precision import keep_memory

    keep_memory()
    try:
        try:
            app(prog_name="tribe")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it exits
        sys.exit(
            CLOSED_PIPE
            if isinstance(error, BrokenPipeError)
            else f"error: stdout could not be written: {error.strerror or error}"
        )
