"""Array files whose headers are damaged or say more than the file holds, and files that unpack to gigabytes."""

import contextlib
import gzip
import io
import zipfile

import numpy as np
import pytest
import torch

import layouts
from layouts import PER, made
from limited import read_limited
from tribe.data.datasets import clean
from tribe.data.datasets.array_files import open_array, open_images, open_labels
from tribe.data.datasets.clean import LARGEST_IDX
from tribe.io.arrays import read_single

SHAPE = (4, 2, 2, 3)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def with_header(text, content=b""):
    """An npy file with this header."""
    text = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def header(shape, descr="'|u1'", fortran="False"):
    return with_header(f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}", bytes(48))


# -- npy --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
def test_images_and_labels_are_those_of_the_file(order, tmp_path):
    images = np.asarray(layouts.pixels(np.random.default_rng(0), *SHAPE), order=order)
    np.save(tmp_path / "images.npy", images)
    assert np.array_equal(open_images(tmp_path / "images.npy", SHAPE), images)
    for dtype in ("u1", "<i8", ">i8", "<i2"):
        np.save(tmp_path / "labels.npy", np.array([3, 0, 1], dtype))
        assert open_labels(tmp_path / "labels.npy", 4).tolist() == [3, 0, 1]
    np.save(tmp_path / "labels.npy", np.array([], int))
    assert open_labels(tmp_path / "labels.npy", 4).tolist() == []


def test_every_flipped_bit_of_a_header_is_read_or_refused(tmp_path):
    """numpy evaluates the header, and fails as TokenError, OverflowError, AttributeError or MemoryError."""
    path = tmp_path / "a.npy"
    for good, read in (
        (npy(np.zeros(SHAPE, np.uint8)), lambda: open_images(path, SHAPE)),
        (npy(np.zeros(48, np.int64)), lambda: open_labels(path, 10)),
        (npy(np.zeros(SHAPE, np.float32)), lambda: open_array(path)),
    ):
        for place in range(128):
            for bit in range(8):
                damaged = bytearray(good)
                damaged[place] ^= 1 << bit
                path.write_bytes(damaged)
                with contextlib.suppress(ValueError):
                    read()
        for length in range(0, len(good), 7):
            path.write_bytes(good[:length])
            with pytest.raises(ValueError, match=r"a.npy cannot be read as"):
                read()


HEADERS = {
    "more than the file": header((10**12,)),
    "more than 64 bits": header((10**18, 10**18)),
    "a size of a thousand digits": header(f"({'9' * 1000},)"),
    "below 0": header((-1, 48)),
    "objects": header((6,), descr="'|O'"),
    "objects with flags": header((6,), descr="[('a', '|O')]"),
    "a type without an end": header((6,), descr=f"'|V{'9' * 200}'"),
    "nested brackets": header("(" * 5000 + ")" * 5000),
    "signs": header(f"({'-' * 9000}1,)"),
    "a call": header((48,), fortran="__import__('os')"),
    "no entries": with_header("{}"),
    "a key twice": with_header("{'descr': '|u1', 'descr': '|u1', 'fortran_order': False, }"),
    "not closed": with_header("{'descr': '|u1', 'fortran_order': False, 'shape': (48,), "),
    "nothing": b"",
    "a header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
    "another version": b"\x93NUMPY\x09\x00\xff\xff{}",
    "a pickle": npy(np.array([None])),
    "another format": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_does_not_fit_its_file_is_refused(case, tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(HEADERS[case])
    for read in (lambda: open_images(path, SHAPE), lambda: open_labels(path, 10), lambda: open_array(path)):
        with pytest.raises(ValueError, match=r"a.npy cannot be read as .*it was cut short, or is no npy file"):
            read()


# -- gzip -------------------------------------------------------------------------------------------------------------

UNPACK = """
for split in ("test", "train"):
    try:
        datasets.create("mnist", data=sys.argv[1], split=split).labels()
    except ValueError as error:
        print(error)
"""


def idx(*shape):
    return np.array([0x800 + len(shape), *shape], ">u4").tobytes()


def zeros(gigabytes):
    """Compressed zeros: a megabyte for each gigabyte."""
    return gzip.compress(bytes(2**20), 9) * (1024 * gigabytes)


def test_a_gzip_file_that_unpacks_to_gigabytes_takes_little_memory(tmp_path):
    (tmp_path / "mnist").mkdir()
    for split, head in (("t10k", idx(10, 28, 28)), ("train", idx(2**32 - 1, 28, 28))):
        packed = gzip.compress(head) + zeros(3)
        (tmp_path / f"mnist/{split}-images-idx3-ubyte.gz").write_bytes(packed)
        (tmp_path / f"mnist/{split}-labels-idx1-ubyte").write_bytes(idx(10) + bytes(10))
    test, train = read_limited(UNPACK, tmp_path).splitlines()
    assert "promises 7840 values; it has fewer or more" in test
    assert f"expected {LARGEST_IDX:,} at most" in train


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("change", [-1, 1])
def test_an_idx_file_has_as_many_values_as_its_header_says(suffix, change, tmp_path):
    (tmp_path / "mnist").mkdir()
    pack = gzip.compress if suffix else bytes
    (tmp_path / f"mnist/t10k-images-idx3-ubyte{suffix}").write_bytes(pack(idx(2, 28, 28) + bytes(2 * 784)))
    (tmp_path / f"mnist/t10k-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(2) + bytes([3, 1])))
    assert made("mnist", tmp_path).labels().tolist() == [3, 1]
    (tmp_path / f"mnist/t10k-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(2) + bytes(2 + change)))
    with pytest.raises(ValueError, match=r"idx1-ubyte.*promises 2 values"):
        made("mnist", tmp_path).labels()


def test_an_idx_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    monkeypatch.setattr(clean, "LARGEST_IDX", 100)
    (tmp_path / "mnist/t10k-images-idx3-ubyte").write_bytes(idx(1, 28, 28) + bytes(784))
    with pytest.raises(ValueError, match=r"it has 800 bytes; expected 100 at most"):
        made("mnist", tmp_path).labels()


# -- npz --------------------------------------------------------------------------------------------------------------


def test_the_only_array_of_an_npz_file_is_read(tmp_path):
    for array in (np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2), np.asfortranarray(np.eye(3))):
        np.savez_compressed(tmp_path / "a.npz", images=array)
        assert np.array_equal(read_single(tmp_path / "a.npz"), array)
    np.savez(tmp_path / "a.npz", a=np.eye(2), b=np.eye(2))
    with pytest.raises(ValueError, match=r"it holds 2 arrays .*; expected one"):
        read_single(tmp_path / "a.npz")


@pytest.mark.parametrize("shape", [(10**6, 3, 32, 32), (1, 3, 8, 8)])
def test_an_npz_file_that_unpacks_to_gigabytes_is_refused_by_its_header(shape, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(
            "images.npy", with_header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}", bytes(2**27))
        )
    with pytest.raises(ValueError, match=r"unpacks to|does not have"):
        read_single(tmp_path / "a.npz")


# -- labels of pickles ------------------------------------------------------------------------------------------------


def test_a_label_beyond_64_bits_is_refused(tmp_path):
    layouts.write_cifar_binary(tmp_path, np.random.default_rng(0))
    layouts.write_cifar_python(
        tmp_path,
        lambda held: layouts.pickled({key: [2**70] * PER if "labels" in str(key) else held[key] for key in held}),
    )
    (tmp_path / "cifar-10-batches-bin").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match="a list of integers"):
        made("cifar10", tmp_path).images("clean", torch.arange(1))
