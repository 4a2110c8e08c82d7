"""npy headers and npz files: sizes are compared before they are believed, and every damage is a ValueError."""

import io
import random
import zipfile

import numpy as np
import pytest

from tribe.io.arrays import Header, read_header, read_npz

KINDS = {"text": "U", "domain": "i", "share": "f", "reset": "b"}
COLUMNS = {
    "text": np.array("words"),
    "domain": np.arange(3),
    "share": np.ones(3, np.float32),
    "reset": np.zeros(3, bool),
}


def npy(text, version=1):
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return io.BytesIO(b"\x93NUMPY" + bytes([version, 0]) + length + text)


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 3), np.uint8), np.zeros((), "<U5"), np.zeros((0, 4)), np.zeros((3, 2), ">i4", order="F")],
    ids=str,
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_headers_that_numpy_writes_are_read(array, version):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    file.seek(0)
    assert read_header(file) == Header(array.dtype, array.shape, array.flags.fnc)
    assert file.read() == array.tobytes("A")


def test_entries_may_come_in_another_order():
    text = b'{"shape": (3L, 4L), "descr": "<f4", "fortran_order": False}\n'
    assert read_header(npy(text, 2)) == Header(np.dtype("<f4"), (3, 4), False)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,)",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (3,)}",
        b"{'descr': '<i3', 'fortran_order': False, 'shape': (3,)}",
        b"{'descr': '<M8[s]', 'fortran_order': False, 'shape': (3,)}",
        b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3 3,)}",
        b"{'descr': '<f4', 'fortran_order': 3, 'shape': (3,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 4400 + b",)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 40 + b")}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 4000 + b")" * 4000 + b"}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'more': 'x'}",
        b"{" * 20_000,
    ],
    ids=lambda text: f"{text[:60]!r}",
)
def test_a_damaged_header_is_a_value_error(text):
    with pytest.raises(ValueError, match="npy"):
        read_header(npy(text))


def test_a_size_beyond_64_bits_does_not_overflow():
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (" + b"999999999999999999," * 4 + b")}"
    assert read_header(npy(text)).nbytes == 8 * 999999999999999999**4


def test_an_npz_file_of_these_arrays_is_read(tmp_path):
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **COLUMNS)
        found = read_npz(tmp_path / "a.npz", KINDS)
        assert found.keys() == KINDS.keys()
        assert all(np.array_equal(found[name], COLUMNS[name]) and found[name].flags.writeable for name in KINDS)


def write(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)


def header(descr, shape):
    return npy(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}".encode()).getvalue()


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (header("<i8", (3, 1)), "expected a column of integers"),
        (header("<f8", (3,)), "expected a column of integers"),
        (header(">i8", (3,)), "expected a column of integers"),
        (header("<i8", (4,)), r"shape \(3,\); expected a column of floats of shape \(4,\)"),
        (header("<i8", (3,)), "does not have the 24 bytes"),
        (header("<i8", (3,)) + bytes(25), "does not have the 24 bytes"),
        (b"no array", "does not begin as an npy file"),
    ],
)
def test_an_array_that_is_not_as_expected_is_refused(tmp_path, member, words):
    np.savez(tmp_path / "good.npz", **COLUMNS)
    with zipfile.ZipFile(tmp_path / "good.npz") as file:
        members = {name: file.read(f"{name}.npy") for name in KINDS}
    write(tmp_path / "a.npz", members | {"domain": member})
    with pytest.raises(ValueError, match=words):
        read_npz(tmp_path / "a.npz", KINDS)


def test_sizes_in_headers_are_compared_before_anything_is_unpacked(tmp_path):
    rows = 10**12
    write(tmp_path / "a.npz", {"domain": header("<i8", (rows,)), "share": header("<f4", (rows,))})
    with pytest.raises(ValueError, match="unpacks to 12,000,000,000,000 bytes; expected at most 67,108,864"):
        read_npz(tmp_path / "a.npz", {"domain": "i", "share": "f"})
    write(tmp_path / "a.npz", {"text": header("<U99999999", ())})
    with pytest.raises(ValueError, match="unpacks to"):
        read_npz(tmp_path / "a.npz", {"text": "U"})


def test_a_bomb_is_read_only_as_far_as_its_header_goes(tmp_path):
    write(tmp_path / "a.npz", {"domain": header("<i8", (1,)) + bytes(2**28)})
    with pytest.raises(ValueError, match="does not have the 8 bytes"):
        read_npz(tmp_path / "a.npz", {"domain": "i"})


def test_other_compressions_are_refused(tmp_path):
    write(tmp_path / "a.npz", {"domain": header("<i8", (0,))}, zipfile.ZIP_LZMA)
    with pytest.raises(ValueError, match="compressed in another way"):
        read_npz(tmp_path / "a.npz", {"domain": "i"})


def test_flipped_bits_give_the_arrays_or_a_value_error(tmp_path):
    path, chance = tmp_path / "a.npz", random.Random(0)
    for save in (np.savez, np.savez_compressed):
        save(path, **COLUMNS)
        good = path.read_bytes()
        for _ in range(400):
            bad = bytearray(good)
            bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
            path.write_bytes(bad[: chance.choice((len(bad), chance.randrange(len(bad))))])
            try:
                found = read_npz(path, KINDS)
            except ValueError:
                continue
            assert all(np.array_equal(found[name], COLUMNS[name]) for name in KINDS)
