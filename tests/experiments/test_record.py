"""Records: what no run has written is refused, since metrics and pages rely on it."""

import numpy as np
import pytest
import torch

from tribe import Record

GOOD = {
    "domain": [0, 0, 1],
    "label": [0, -1, 2],
    "prediction": [0, 1, 2],
    "confidence": [0.5, 1.0, 0.25],
    "seconds": [0.0, 1.0, 2.0],
}


def made(**changes):
    columns = {name: torch.tensor(values) for name, values in (GOOD | changes).items() if name in GOOD}
    rest = {"domains": ("fog", "snow"), "classes": 3, "spec": {"seed": 0}} | changes
    return Record(**columns, **{name: value for name, value in rest.items() if name not in GOOD})


def test_it_goes_through_a_file(tmp_path):
    made().save(tmp_path / "record.npz")
    record = Record.load(tmp_path / "record.npz")
    assert record.domains == ("fog", "snow")
    assert all(torch.equal(getattr(record, name), getattr(made(), name)) for name in GOOD)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"domain": [0, 0, 2]}, "domain"),
        ({"label": [0, -2, 1]}, "label"),
        ({"label": [0, 1, 3]}, "label"),
        ({"prediction": [0, 1, 3]}, "prediction"),
        ({"prediction": [0, 1]}, "length"),
        ({"confidence": [0.5, 1.0, 1.5]}, "confidence"),
        ({"seconds": [0.0, -1.0, 2.0]}, "seconds"),
        ({"seconds": [0.0, float("inf"), 2.0]}, "seconds"),
        ({"domains": ("fog",) * 2**12, "classes": 2**12}, "pairs"),
        ({"classes": -1}, "classes"),
    ],
)
def test_wrong_contents_are_refused(tmp_path, changes, word):
    made(**changes).save(tmp_path / "record.npz")
    with pytest.raises(ValueError, match=word):
        Record.load(tmp_path / "record.npz")


@pytest.mark.parametrize(
    "change", [{"domain": np.zeros(3)}, {"label": np.zeros((3, 1), int)}, {"words": np.array("[]")}]
)
def test_wrong_arrays_are_refused(tmp_path, change):
    path = tmp_path / "record.npz"
    made().save(path)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez_compressed(path, **(arrays | change))
    with pytest.raises(ValueError, match="damaged"):
        Record.load(path)


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    made().save(tmp_path / "record.npz")
    with np.load(tmp_path / "record.npz") as file:
        arrays = dict(file)
    np.savez(tmp_path / "record.npz", **(arrays | {"label": np.array([print, 1, 2], dtype=object)}))
    with pytest.raises(ValueError, match="damaged"):
        Record.load(tmp_path / "record.npz")
