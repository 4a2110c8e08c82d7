"""Pickles that are made to harm: each is read correctly or refused, in little time and memory, and changes nothing."""

import contextlib
import itertools
import pickle
import struct

import numpy as np
import pytest

import layouts
from limited import read_limited
from tribe.data.datasets import unpickle as module
from tribe.data.datasets.unpickle import LARGEST, OPERATIONS, UnpickleError, unpickle

DTYPE = b"cnumpy\ndtype\n"
RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
BYTE = DTYPE + b"U\x02u1K\x00K\x01\x87R"


def array(shape, dtype, content, fortran=b"\x89"):
    """The operations that make an array."""
    return RECONSTRUCT + b"(K\x01" + shape + dtype + fortran + content + b"tb"


def doubled(times):
    """A tuple of two times the same tuple of two times the same tuple: 2 ** times elements in a few bytes."""
    return b")" + b"q\x00h\x00\x86" * times


def read(tmp_path, content):
    path = tmp_path / "batch"
    path.write_bytes(content)
    return unpickle(path)


def refused(tmp_path, content):
    with pytest.raises(UnpickleError, match=r"batch (is refused|cannot be read)") as caught:
        read(tmp_path, content)
    return str(caught.value)


# -- arrays -----------------------------------------------------------------------------------------------------------


def test_an_array_is_its_bytes_in_its_shape(tmp_path):
    made = read(tmp_path, b"\x80\x02" + array(b"K\x02K\x03\x86", BYTE, b"U\x06abcdef") + b".")
    assert made.dtype == np.uint8
    assert made.tobytes() == b"abcdef"
    assert made.shape == (2, 3)
    turned = read(tmp_path, b"\x80\x02" + array(b"K\x02K\x03\x86", BYTE, b"U\x06abcdef", fortran=b"\x88") + b".")
    assert turned[0].tobytes() == b"ace"


STATES = list(  # version, byte order, subtype, names, fields, size, alignment, flags
    itertools.product((3, 4), ("|", "<"), (None,), (None, ("a",)), (None, {"a": 0}), (-1, 8), (-1, 8), (0, 1, 63, 255))
)


@pytest.mark.parametrize("kind", ["O8", "u1", "V8", "i8", "U4"])
def test_the_state_of_a_type_reaches_no_numpy_type(kind, tmp_path):
    """Flags say that an element is a pointer: numpy then follows what the file holds."""
    content = b"U\x08" + b"\x41" * 8
    for state in STATES:
        dtype = DTYPE + b"U\x02" + kind.encode() + b"K\x00K\x01\x87R" + pickle.dumps(state, 2)[2:-1] + b"b"
        file = b"\x80\x02" + array(b"K\x08\x85", dtype, content) + b"."
        if kind == "u1":
            assert read(tmp_path, file).tobytes() == b"A" * 8
        else:
            assert "expected bytes (uint8)" in refused(tmp_path, file)
    assert np.dtype("u1") == np.uint8
    assert not np.dtype("u1").hasobject


ARRAYS = {
    "more elements than bytes": array(b"J\xff\xff\xff\x7f\x85", BYTE, b"U\x01a"),
    "fewer elements than bytes": array(b"K\x00\x85", BYTE, b"U\x01a"),
    "a size below 0": array(b"J\xff\xff\xff\xff\x85", BYTE, b"U\x01a"),
    "a size that is a truth value": array(b"\x88\x85", BYTE, b"U\x01a"),
    "a size of 2000 bits": array(b"\x8a\xff" + b"\x7f" * 255 + b"\x85", BYTE, b"U\x00"),
    "many huge sizes": array(b"(" + b"\x8a\xff" + b"\x7f" * 255 + b"q\x01" + b"h\x01" * 50_000 + b"t", BYTE, b"U\x00"),
    "many axes": array(b"(" + b"K\x01" * 100 + b"t", BYTE, b"U\x01a"),
    "a shape that is a list": array(b"]", BYTE, b"U\x01a"),
    "objects": array(b"K\x01\x85", BYTE, b"](K\x01e"),
    "a type that is text": array(b"K\x01\x85", b"U\x02u1", b"U\x01a"),
    "no state": RECONSTRUCT + b"Nb",
    "a type that is a huge tuple": doubled(100) + b"0",
    "elements of a huge type": DTYPE + doubled(100) + b"\x85R",
    "a codec that is a huge tuple": b"c_codecs\nencode\nX\x01\x00\x00\x00a" + doubled(100) + b"\x86R",
    "a name that is a huge tuple": doubled(100) + doubled(100) + b"\x93",
}


@pytest.mark.parametrize("case", ARRAYS)
def test_an_array_that_is_not_its_bytes_is_refused(case, tmp_path):
    refused(tmp_path, b"\x80\x02" + ARRAYS[case] + b".")


# -- state of other objects -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numpy.core.multiarray\n_reconstruct", "numpy\nndarray", "_codecs\nencode"])
def test_no_attribute_of_a_function_or_class_is_set(name, tmp_path):
    before = dict(vars(np.ndarray))
    assert "not an array" in refused(tmp_path, b"\x80\x02c" + name.encode() + b"\n}U\x05spoilU\x01xsb.")
    assert dict(vars(np.ndarray)) == before


def test_one_file_does_not_change_how_the_next_is_read(tmp_path):
    good = layouts.pickled({b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), b"labels": [3, 1]})
    for crafted in (*ARRAYS.values(), b"c_codecs\nencode\n}U\x08__name__U\x01xsb", BYTE + b"(K\x03U\x01>NNNK\x08tb"):
        (tmp_path / "crafted").write_bytes(b"\x80\x02" + crafted + b".")
        with contextlib.suppress(UnpickleError):
            unpickle(tmp_path / "crafted")
        read_after = read(tmp_path, good)
        assert read_after[b"labels"] == [3, 1]
        assert read_after[b"data"].tolist() == [[0, 1, 2], [3, 4, 5]]


# -- memory and time --------------------------------------------------------------------------------------------------

BOMBS = {
    "a place in the memo of 2 ** 30": b"\x80\x02]r\xff\xff\xff\x3f.",  # nine bytes
    "the last place in the memo": b"\x80\x02]r\xff\xff\xff\xff.",
    "a string that says 2 GB": b"\x80\x02T\xff\xff\xff\x7fabc.",
    "bytes that say 4 GB": b"\x80\x03B\xff\xff\xff\xffabc.",
    "bytes that say 2 ** 62": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"abc.",
    "a number that says 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "a number of 100,000 digits": b"I" + b"9" * 100_000 + b"\n.",
    "a frame of 2 ** 62": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "one string encoded again and again": b"\x80\x02c_codecs\nencode\nq\x00X\x40\x42\x0f\x00"
    + b"a" * 1_000_000
    + b"q\x01X\x06\x00\x00\x00latin1q\x02\x86R"
    + b"h\x00h\x01h\x02\x86R" * 10_000
    + b".",
    "a key that takes for ever to hash": b"\x80\x02}" + doubled(100) + b"K\x01s.",
    "keys of a list": b"\x80\x02(" + doubled(100) + b"K\x01d.",
    "nested tuples": b"\x80\x02)" + b"\x85" * 500_000 + b".",
    "nested lists": b"\x80\x02" + b"(" * 300_000 + b"l" * 300_000 + b".",
    "nested dictionaries": b"\x80\x02" + b"}K\x01" * 200_000 + b"}" + b"s" * 200_000 + b".",
    "marks": b"\x80\x02" + b"(" * (2 * OPERATIONS) + b".",
    "empty lists": b"\x80\x02" + b"]" * (2 * OPERATIONS) + b".",
    "a deep stack that is popped": b"\x80\x02" + b"K\x01" * 300_000 + b"\x87" * 150_000 + b".",
    "a list that is extended with itself": b"\x80\x02]q\x00" + b"(h\x00h\x00e" * 100_000 + b".",
    "a memo without an end": b"\x80\x04" + b"N\x94" * OPERATIONS + b".",
}
READ = """
for path in map(Path, sys.argv[1:]):
    try:
        unpickle(path)
        print("read")
    except UnpickleError as error:
        print(str(error)[:200])
"""


def test_crafted_sizes_and_depths_take_little_time_and_memory(tmp_path):
    paths = []
    for number, content in enumerate(BOMBS.values()):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(content)
    printed = read_limited(READ, *paths).splitlines()
    assert len(printed) == len(BOMBS)
    ends = dict(zip(BOMBS, printed, strict=True))
    harmless = ("a place in the memo of 2 ** 30", "the last place in the memo", "a frame of 2 ** 62", "nested tuples")
    assert all(ends[case] == "read" for case in harmless)
    assert "more bytes than it holds" in ends["one string encoded again and again"]
    assert all("operations" in ends[case] for case in ("marks", "empty lists", "a memo without an end"))
    assert all("key" in ends[case] for case in ("a key that takes for ever to hash", "keys of a list"))


def test_a_list_that_contains_itself_is_read(tmp_path):
    made = read(tmp_path, b"\x80\x02]q\x00h\x00a.")
    assert made[0] is made


@pytest.mark.parametrize(
    "content", [b"", b".", b"0.", b"\x80", b"\x80\x02", b"t.", b"h\x00.", b"q\x00.", b"a.", b"s.", b"b."]
)
def test_a_file_without_values_is_refused(content, tmp_path):
    refused(tmp_path, content)


def test_the_largest_published_file_is_far_from_the_bounds(tmp_path, monkeypatch):
    """CIFAR-100's training set: 50,000 names and two lists of labels. Its pixels are one operation."""
    count = 50_000
    held = {
        b"filenames": [b"image_s_%06d.png" % i for i in range(count)],
        b"fine_labels": [i % 100 for i in range(count)],
        b"coarse_labels": [i % 20 for i in range(count)],
        b"data": np.zeros((count, 1), np.uint8),
    }
    content = layouts.pickled(held)
    assert len(content) + count * 3071 < LARGEST
    monkeypatch.setattr(module, "OPERATIONS", OPERATIONS // 3)
    assert read(tmp_path, content)[b"fine_labels"] == held[b"fine_labels"]


def test_every_cut_and_flipped_bit_of_a_batch_is_read_or_refused(tmp_path):
    good = layouts.pickled({b"data": np.zeros((2, 4), np.uint8), b"labels": [3, 1]})
    for length in range(len(good)):
        refused(tmp_path, good[:length])
    for place in range(len(good)):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[place] ^= 1 << bit
            with contextlib.suppress(UnpickleError):
                read(tmp_path, bytes(damaged))
