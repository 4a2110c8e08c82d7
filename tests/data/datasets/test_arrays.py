"""npy and npz files: every damage is a ValueError."""

import numpy as np
import pytest

from tribe.data.datasets.files import open_npy, read_npz


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.uint8), np.zeros((0, 4)), np.zeros((3, 2), ">i4", "F")], ids=str)
def test_npy_files_are_mapped_and_their_size_is_checked(array, tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, array)
    assert np.array_equal(open_npy(path), array)
    whole = path.read_bytes()
    for damaged in (whole + b"x", whole[: max(100, len(whole) - 5)][:-1], b"", b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"cut short|longer"):
            open_npy(path)


@pytest.mark.parametrize("name", ["npy", "npz"])
def test_objects_are_never_unpickled(name, tmp_path):
    array = np.array([{}], object)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", a=array)
    with pytest.raises(ValueError, match=r"pickle|objects|Object"):
        (open_npy if name == "npy" else read_npz)(tmp_path / f"a.{name}")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_is_read(tmp_path, save):
    arrays = {"text": np.array("words"), "domain": np.arange(3), "share": np.ones(3, np.float32)}
    save(tmp_path / "a.npz", **arrays)
    read = read_npz(tmp_path / "a.npz")
    assert read.keys() == arrays.keys()
    assert all(np.array_equal(read[name], arrays[name]) and read[name].flags.writeable for name in arrays)


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", domain=np.zeros(2**24, int))
    with pytest.raises(ValueError, match="unpacks"):
        read_npz(tmp_path / "a.npz")
