"""The container of tensor files: what is written is read back, and every damage is refused."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tribe.io import tensors as tensor_file
from tribe.io.states import STATE, StateFileError
from tribe.io.tensors import Kind, TensorFileError

KIND = Kind("tribe-notes", 2, {"title": str, "pages": int, "tags": dict}, noun="file of notes", advice="Write it again")
HEADER = {"title": "12", "pages": 3, "tags": {"a": [1, None]}}
TENSORS = {"b": torch.arange(6).view(2, 3).T, "a": torch.rand(4, dtype=torch.float64)}


@pytest.fixture
def path(tmp_path):
    tensor_file.write(tmp_path / "notes", KIND, HEADER, TENSORS)
    return tmp_path / "notes"


def rewrite(path, **changes):
    """The same file with other metadata; None removes an entry."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata = {name: value for name, value in (metadata | changes).items() if value is not None}
    save_file(tensors, path, metadata)


def test_header_and_tensors_come_back(path):
    header, tensors = tensor_file.read(path, KIND)
    assert header == HEADER
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": "13"}, "damaged"),
        ({"tribe": "0"}, "damaged"),
        ({"digest": None}, "damaged"),
        ({"format": "tribe-other"}, "not a file of notes"),
        ({"schema": "3", "tribe": "9.9"}, "schema 3"),
        ({"schema": "x"}, "with schema x"),
    ],
)
def test_other_metadata_is_refused(path, changes, message):
    rewrite(path, **changes)
    with pytest.raises(TensorFileError, match=message):
        tensor_file.read(path, KIND)


@pytest.mark.parametrize("pages", ["three", True, [3], None])
def test_a_header_of_another_type_is_refused(path, pages):
    tensor_file.write(path, KIND, HEADER | {"pages": pages}, TENSORS)
    with pytest.raises(TensorFileError, match="header"):
        tensor_file.read(path, KIND)


def test_missing_files_and_folders_are_told_apart(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file of notes at .*missing"):
        tensor_file.read(tmp_path / "missing", KIND)
    with pytest.raises(IsADirectoryError, match="is a folder; expected a file of notes"):
        tensor_file.read(tmp_path, KIND)


@pytest.mark.parametrize("content", [b"", b"not a file of ours, but long enough to look like one"])
def test_a_file_of_no_tensors_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(TensorFileError, match=r"cut short|not a file of notes"):
        tensor_file.read(path, KIND)


def test_a_kind_raises_its_own_error(path):
    with pytest.raises(StateFileError, match="not a tribe state file"):
        tensor_file.read(path, STATE)
