"""JSON from elsewhere: an error is a ValueError that names the file, the place in it and what was expected."""

import json
import os
import re

import pytest

from tribe.io import json_files
from tribe.io.json_files import Where, check, parse

SCHEMA = {
    "kind": {"bench", "draws"},
    "seeds": {...: {"images": int, "error": (float, None)}},
    "code?": str,
    "shape": [Where(int, lambda size: size > 0, "a size, at least 1")],
}
GOOD = {"kind": "bench", "seeds": {"0": {"images": 3, "error": None}}, "shape": [3, 32]}
WRONG = {
    "it is a list of 0; expected an object": [],
    "kind is missing; expected 'bench' or 'draws'": {},
    "kind is 'other'; expected 'bench' or 'draws'": GOOD | {"kind": "other"},
    "kind is a list of 1; expected 'bench' or 'draws'": GOOD | {"kind": ["bench"]},
    "seeds is a list of 0; expected an object": GOOD | {"seeds": []},
    "seeds.0.images is missing; expected an integer": GOOD | {"seeds": {"0": {"error": 1.0}}},
    "seeds.0.images is True; expected an integer": GOOD | {"seeds": {"0": {"images": True, "error": 1.0}}},
    "code is 3; expected text": GOOD | {"code": 3},
    "shape.1 is 0; expected a size, at least 1": GOOD | {"shape": [1, 0]},
    "shape.0 is 'x'; expected an integer": GOOD | {"shape": ["x"]},
}


def test_a_value_of_the_schema_comes_back_as_it_is():
    assert parse(json.dumps(GOOD), SCHEMA, "f.json") == GOOD
    assert parse(json.dumps(GOOD | {"code": "5f", "other": 1}).encode(), SCHEMA, "f.json")["other"] == 1


@pytest.mark.parametrize("words", WRONG)
def test_an_error_names_the_file_the_place_and_what_was_expected(words):
    with pytest.raises(ValueError, match=f"^{re.escape(f'f.json is damaged: {words}. Measure again')}$"):
        parse(json.dumps(WRONG[words]), SCHEMA, "f.json", "Measure again")


def test_the_nearest_of_several_schemas_is_named():
    with pytest.raises(ValueError, match=r"a\.b is 'x'; expected an integer"):
        check({"a": {"b": "x"}}, {"a": (None, {"b": int})}, "f.json")


def test_a_key_that_is_not_printable_is_quoted():
    with pytest.raises(ValueError, match=r"x1b\[31m' is 1; expected text") as error:
        check({"\x1b[31m": 1}, {...: str}, "f.json")
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"-" + b"1" * 5000],
    ids=lambda content: f"{content[:12]!r}",
)
def test_damaged_or_excessive_json_is_a_value_error(content):
    with pytest.raises(ValueError, match=r"f\.json is damaged: it is not JSON, or it was cut short"):
        parse(content, object, "f.json")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(number):
    with pytest.raises(ValueError, match=r"error is .*; expected a finite number"):
        parse(f'{{"error": {number}}}', {"error": float}, "f.json")


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "f.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(ValueError, match="bytes"):
        json_files.read(path, object)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "f.json")
    with pytest.raises(ValueError, match="regular file"):
        json_files.read(tmp_path / "f.json", object)
    with pytest.raises(ValueError, match="regular file"):
        json_files.read(tmp_path, object)
    with pytest.raises(FileNotFoundError):
        json_files.read(tmp_path / "missing.json", object)
