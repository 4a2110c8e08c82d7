"""The list of readers is complete: a function that opens a file is in it, or is listed with a reason."""

import sys
import threading

import pytest

pytest.importorskip("typer")
pytest.importorskip("PIL")

from fuzz import openers
from fuzz.readers import NO_READERS, READERS

CLAIMED = {function for reader in READERS.values() for function in reader.functions}
ADVICE = (
    "Add a reader to tests/fuzz/readers.py that calls it, or, if no file of a user gets there, add it to NO_READERS"
)


def test_every_function_that_opens_a_file_is_fuzzed():
    missing = openers.readers() - CLAIMED - NO_READERS.keys()
    assert not missing, f"these open or decode files, but no reader of the fuzzer does: {sorted(missing)}. {ADVICE}"


def test_no_function_on_the_list_is_gone():
    assert not (CLAIMED | NO_READERS.keys()) - openers.readers(), "they open no file any more: remove them"
    assert not CLAIMED & NO_READERS.keys()


@pytest.mark.parametrize("name", READERS)
def test_a_reader_calls_the_functions_that_it_lists(tmp_path, name):
    called = set()

    def watch(frame, event, argument):
        if event == "call" and (module := frame.f_globals.get("__name__", "")).startswith("tribe."):
            called.add(f"{module}.{frame.f_code.co_qualname}".replace(".<locals>", ""))

    reader = READERS[name]
    reader.make(tmp_path)
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        reader.read(tmp_path)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert not set(reader.functions) - called
