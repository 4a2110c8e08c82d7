"""Damaged files end in the right result or in an error of a documented kind, within limits of time and memory.

See the package's docstring for how to replay a case.
"""

import pytest

pytest.importorskip("typer")
pytest.importorskip("PIL")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.broken import BROKEN
from fuzz.cases import Fuzzer
from fuzz.readers import READERS
from fuzz.structure import DOCUMENTS, FORMATS, edited

FEW, MANY = 7, 60  # seeds of bytes for each reader
FEW_DOCUMENTS, MANY_DOCUMENTS = 10, 80


@pytest.fixture(scope="module")
def fuzzer():
    with Fuzzer() as fuzzer:
        yield fuzzer


def damage_bytes(fuzzer, name, seeds):
    failures = []
    for seed in seeds:
        content = fuzzer.seeded(name, seed)
        outcome = fuzzer.read(name, content)
        if outcome.is_failure:
            failures.append(f"--reader {name} --seed {seed}: {fuzzer.explain(name, content, outcome)}")
    assert not failures, "\n\n".join(failures[:3])


def damage_document(fuzzer, name, count):
    """Hypothesis draws the same documents every time."""
    path, content = fuzzer.valid(name)
    path, format = fuzzer.root / "valid" / name / path, FORMATS[DOCUMENTS[name]]
    document = format.load(content, path)

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data):
        damaged = format.dump(data.draw(edited(document)), content, path)
        outcome = fuzzer.read(name, damaged, sealed=False)
        assert not outcome.is_failure, fuzzer.explain(name, damaged, outcome)

    check()


@pytest.mark.parametrize("name", READERS)
def test_a_file_with_damaged_bytes(fuzzer, name):
    damage_bytes(fuzzer, name, range(FEW))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_with_wrong_contents(fuzzer, name):
    damage_document(fuzzer, name, FEW_DOCUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_files_with_damaged_bytes(fuzzer, name):
    damage_bytes(fuzzer, name, range(FEW, FEW + MANY))


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_many_documents_with_wrong_contents(fuzzer, name):
    damage_document(fuzzer, name, MANY_DOCUMENTS)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "memory")) for n in BROKEN])
def test_a_reader_that_fails_is_found(fuzzer, tmp_path, name):
    assert fuzzer.worker.read(f"broken {name}", tmp_path).kind == BROKEN[name]


def test_there_are_enough_cases():
    assert FEW * len(READERS) + FEW_DOCUMENTS * len(DOCUMENTS) >= 300
    assert MANY * len(READERS) + MANY_DOCUMENTS * len(DOCUMENTS) >= 2000


def test_cases_are_the_same_every_time():
    with Fuzzer() as one, Fuzzer() as other:
        for name in ("state", "record", "image-png", "run-checkpoint", "weights-pt"):
            assert [one.seeded(name, seed) for seed in range(20)] == [other.seeded(name, seed) for seed in range(20)]
