"""Records and results that are sound containers with wrong contents: an error names the file and what was expected."""

import json
import zipfile

import numpy as np
import pytest
import torch

from reproduce_helpers import fabricate
from tribe.data import scenarios
from tribe.experiments import report, store
from tribe.experiments.record import MOST_CLASSES, Record
from tribe.experiments.scores import record_scores

HEADER = {"format": "tribe-record", "schema": 2, "domains": ["fog"], "classes": 4, "spec": {"method": "tent"}}
COLUMNS = {
    "domain": np.zeros(3, np.int64),
    "label": np.array([-1, 0, 3]),
    "prediction": np.array([0, 1, 3]),
    "confidence": np.ones(3, np.float32),
    "seconds": np.ones(3, np.float32),
}


def write_record(path, header=None, **columns):
    text = header if isinstance(header, str) else json.dumps(HEADER | (header or {}))
    np.savez_compressed(path, words=np.array(text), **COLUMNS | columns)


def test_the_sound_record_of_these_tests_is_read(tmp_path):
    write_record(tmp_path / "r.npz")
    assert Record.load(tmp_path / "r.npz").domains == ("fog",)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"domains": 3}, "domains is 3; expected a list"),
        ({"domains": ["fog", 4]}, r"domains\.1 is 4; expected text"),
        ({"domains": ["d"] * (MOST_CLASSES + 1)}, "expected at most 65536 domains"),
        ({"classes": "four"}, "classes is 'four'; expected an integer"),
        ({"classes": -1}, "classes is -1; expected an integer from 0 to 65536"),
        ({"classes": 10**9}, "expected an integer from 0 to 65536"),
        ({"spec": []}, "spec is a list of 0; expected an object"),
        ({"schema": "2"}, "is of format tribe-record 2"),
        ({"schema": None}, "is of format tribe-record None"),
        ('{"a":' * 50_000, "its header is damaged"),
        ("[]", "its header is damaged: it is a list of 0; expected an object"),
        ({"classes": 10**30}, "an integer has 31 digits"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_of_wrong_contents_is_refused(tmp_path, header, words):
    write_record(tmp_path / "r.npz", header)
    with pytest.raises(ValueError, match=words) as error:
        Record.load(tmp_path / "r.npz")
    assert "r.npz" in str(error.value)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"domain": np.ones(3, np.int64)}, "column domain holds 1 to 1; expected 0 to 0"),
        ({"label": np.array([-2, 0, 0])}, "column label holds -2 to 0; expected -1 to 3"),
        ({"prediction": np.array([0, 0, 4])}, "column prediction holds 0 to 4; expected 0 to 3"),
        ({"confidence": np.full(3, 1.5, np.float32)}, "column confidence"),
        ({"seconds": np.full(3, np.inf, np.float32)}, "column seconds"),
        ({"label": np.zeros(3, np.float32)}, "array label is float32"),
        ({"label": np.zeros((3, 1), np.int64)}, "array label is int64"),
        ({"label": np.zeros(4, np.int64)}, "array label is int64"),
        ({"seconds": np.ones(3, np.longdouble)}, "array seconds is"),
        ({"seconds": np.ones(3, ">f4")}, "array seconds is"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_column_of_wrong_contents_is_refused(tmp_path, column, words):
    write_record(tmp_path / "r.npz", **column)
    with pytest.raises(ValueError, match=words):
        Record.load(tmp_path / "r.npz")


def test_a_table_that_would_exhaust_the_memory_is_refused(tmp_path):
    write_record(tmp_path / "r.npz", {"domains": [str(i) for i in range(20_000)], "classes": 65_536})
    with pytest.raises(ValueError, match="20,000 domains times 65,536 classes; expected at most 4,194,304 pairs"):
        Record.load(tmp_path / "r.npz")
    assert report.collect(tmp_path).damaged


def test_a_record_of_too_many_domains_for_a_page_is_left_out(tmp_path):
    write_record(tmp_path / "r.npz", {"domains": [str(i) for i in range(10_000)]})
    assert Record.load(tmp_path / "r.npz").classes == 4
    assert report.collect(tmp_path).damaged == (("r.npz", "it has 10,000 domains; a page shows at most 8,192"),)


@pytest.mark.parametrize("load", [Record.load, scenarios.load])
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, load):
    rows = 2**26
    names = {"domain": "<i8", "label": "<i8", "prediction": "<i8", "confidence": "<f4", "seconds": "<f4"}
    names |= {"index": "<i8", "reset": "|b1"}
    write_record(tmp_path / "small.npz")
    with zipfile.ZipFile(tmp_path / "small.npz") as small, zipfile.ZipFile(tmp_path / "bomb.npz", "w") as bomb:
        bomb.writestr("words.npy", small.read("words.npy"))
        for name, dtype in names.items():
            text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({rows},), }}".encode()
            head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
            bomb.writestr(f"{name}.npy", head + bytes(2**20), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"unpacks to .* bytes; expected at most 67,108,864"):
        load(tmp_path / "bomb.npz")


def test_domain_errors_of_many_domains_are_computed_in_one_pass():
    count = 60_000
    order = torch.arange(count)
    ones, spec = torch.ones(count), {"seed": 0}
    record = Record(order, order % 2, order * 0, ones, ones, tuple(map(str, range(count))), 2, spec)
    assert record_scores(record)["domain_error"]["7"] == 1.0


# -- results ----------------------------------------------------------------------------------------------------------

DEEP = json.loads("[" * 100 + "]" * 100)
WRONG = {
    "metrics": [
        {"seeds": []},
        {"seeds": {"425": 3}},
        {"seeds": {"425": {"images": 1}}},
        {"id": 3},
        lambda scores: scores.update(domain_error=[1]),
        lambda scores: scores.update(instance_error="low"),
        lambda scores: scores.update(class_counts={"fog": [1], "snow": [1, 2]}),
        lambda scores: scores.update(class_counts={"fog": [-1]}),
        lambda scores: scores.update(images=None),
        {"more": DEEP},
    ],
    "environment": [{"machine": 3}, {"seconds_per_image": [1]}, {"seconds_per_image": {"425": "fast"}}, {"x": DEEP}],
    "spec": [
        {"spec": 3},
        {"spec": {}},
        {"spec": {"seeds": [0]}},
        {"schema": "2"},
        {"id": None},
        {"spec": {"dataset": DEEP}},
    ],
}


@pytest.fixture
def results(tmp_path):
    fabricate((20.0, 30.0), tmp_path / "runs", method="tent")
    fabricate((21.0, 31.0), tmp_path / "runs", method="source")
    return tmp_path / "runs"


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, changes in WRONG.items() for change in changes])
def test_a_result_of_wrong_contents_is_named_and_the_others_are_read(results, name, change):
    folder = sorted(results.iterdir())[0]
    path = folder / f"{name}.json"
    content = json.loads(path.read_text())
    if callable(change):
        change(content["seeds"]["425"])
    else:
        content |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=folder.name):
        store.load(folder)
    found = list(store.survey(results))
    assert [type(one) for one in found] == [store.Damaged, store.Result]
    runs = report.collect(results)
    assert len(runs.groups) == 1
    ((place, reason),) = runs.damaged
    assert place == folder.name
    assert reason


def test_a_pack_of_wrong_contents_is_named_and_the_others_are_read(results, tmp_path):
    store.keep(results, tmp_path / "kept")
    (pack,) = (tmp_path / "kept").glob("*.jsonl")
    good = pack.read_bytes().splitlines()
    changed = [json.loads(good[0]) | change for change in ({"metrics": 3}, {"environment": []}, {"spec": None})]
    lines = [json.dumps(line).encode() for line in changed] + [b"[" * 100_000, b"3", b"{}", b"", good[1]]
    pack.write_bytes(b"\n".join(lines))
    found = store.read_pack(pack)
    assert [type(one) for one in found] == [store.Damaged] * 6 + [store.Result]
    assert all(str(pack) in str(one.error) for one in found[:-1])
    (tmp_path / "kept" / "folder.jsonl").mkdir()
    assert [type(one) for one in store.read_pack(tmp_path / "kept" / "folder.jsonl")] == [store.Damaged]
    assert len(report.collect(tmp_path / "kept").damaged) == 7
