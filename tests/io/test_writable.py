"""Output that cannot be written is found before the work. On a full disk the error names the file; old files stay."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tribe.io.files import CannotWrite, check_file, check_folder, write_atomically

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses /proc and Linux's mounts")


@pytest.fixture
def full_disk(tmp_path):
    """A disk of 64 kB without free space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting needs privileges")
    try:
        (disk / "old").write_bytes(b"old")
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:  # until there is no space left
                file.write(b"0" * 4096)
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture
def file_limit():
    """Files of at most 1,000 bytes: a write beyond fails, as on a full disk. (Python ignores SIGXFSZ.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def unwritable(folder):
    """Paths of folders that cannot be written or made, and what the error says."""
    (folder / "file").touch()
    (folder / "dangling").symlink_to(folder / "missing" / "deeper")
    return {
        Path("/proc/self"): "a file in /proc/self could not be written",
        Path("/proc/nothing"): "a file in /proc could not be written",
        folder / "file": "file cannot be a folder",
        folder / "file" / "below": "below cannot be a folder: .*file is not one",
        folder / "dangling": "dangling cannot be a folder",
        folder / "dangling" / "below": "below cannot be a folder: .*dangling is not one",
    }


def test_a_folder_that_cannot_be_written_is_found(tmp_path):
    for folder, message in unwritable(tmp_path).items():
        with pytest.raises(OSError, match=message):
            check_folder(folder)


def test_a_file_that_cannot_be_written_is_found(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "missing" / "deeper")
    cases = {
        "/proc/x.json": "a file in /proc could not be written",
        tmp_path: "is a folder; expected the path of a file",
        tmp_path / "file" / "x.json": "there is no folder .*file to write x.json into",
        tmp_path / "dangling": "there is no folder .*missing to write deeper into",
    }
    for path, message in cases.items():
        with pytest.raises(OSError, match=message):
            check_file(path)


def test_the_check_changes_nothing(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    check_file(tmp_path / "file")
    check_file(tmp_path / "new")
    check_folder(tmp_path)
    check_folder(tmp_path / "not" / "yet")
    os.mkfifo(tmp_path / "pipe")
    check_file(tmp_path / "pipe")  # opening it would wait for a reader
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_full_disk_is_found_and_keeps_the_old_file(full_disk):
    for check in (lambda: check_folder(full_disk), lambda: check_file(full_disk / "new")):
        with pytest.raises(CannotWrite, match=r"a file in .*disk could not be written: No space left on device"):
            check()
    with pytest.raises(CannotWrite, match=r"old could not be written: No space .* needs 0.1 MB, and 0.0 MB are free"):
        write_atomically(full_disk / "old", bytes(100_000))
    assert (full_disk / "old").read_bytes() == b"old"
    assert sorted(path.name for path in full_disk.iterdir()) == ["filler", "old"]


def test_a_failed_write_names_the_file_and_what_it_needs(tmp_path, file_limit):
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    write_atomically(tmp_path / "file", b"old")
    with pytest.raises(CannotWrite, match=r"file could not be written: File too large. It needs 2.0 MB, and .* MB"):
        write_atomically(tmp_path / "file", bytes(2_000_000))
    with pytest.raises(CannotWrite, match=r"a file in .* could not be written: File too large"):
        check_folder(tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this platform has no /dev/full")
def test_a_full_device_is_named():
    with pytest.raises(CannotWrite, match="/dev/full could not be written: No space left on device"):
        write_atomically("/dev/full", b"text")
