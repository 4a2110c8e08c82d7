"""Atomic writes: a kill at any point leaves the old file or the new one. Checks before the work. Locks."""

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from itertools import count, groupby
from pathlib import Path

import pytest

from tribe.io import files as atomic
from tribe.io.files import Busy, CannotWrite, check_file, check_folder, exclusive, write_atomically, write_new

OLD, NEW = b"old" * 100_000, b"new" * 100_000


def status_of_child(action):
    """Run an action in a forked child, and return how the child ended."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def kill_at_line(number):
    """Kill this process right before the given line that runs in atomic.py, counted from now on."""
    lines = count(1)

    def trace(frame, event, argument):
        if frame.f_code.co_filename != atomic.__file__:
            return None
        if event == "line" and next(lines) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def test_a_kill_at_any_line_leaves_the_old_file_or_the_new(tmp_path):
    path, found, unfinished = tmp_path / "file", [], 0
    for line in count(1):
        write_atomically(path, OLD)

        def save(line=line):
            kill_at_line(line)
            write_atomically(path, NEW)

        status = status_of_child(save)
        found.append(path.read_bytes())
        leftovers = [other for other in tmp_path.iterdir() if other != path]
        unfinished += bool(leftovers)
        for leftover in leftovers:
            leftover.unlink()
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert [content for content, _ in groupby(found)] == [OLD, NEW]
    assert found.count(NEW) > 5, "kills after the rename, too"
    assert unfinished > 5, "kills between the first byte and the rename"


def test_a_kill_in_the_middle_of_the_bytes_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, OLD)

    def save():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills a process that writes more than the limit
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(NEW) // 2, len(NEW) // 2))
        write_atomically(path, NEW)

    assert os.WTERMSIG(status_of_child(save)) == signal.SIGXFSZ
    assert path.read_bytes() == OLD
    (half,) = (other for other in tmp_path.iterdir() if other != path)
    assert half.stat().st_size == len(NEW) // 2


def test_the_file_and_then_its_folder_are_synced(tmp_path, monkeypatch):
    events = []

    def fsync(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    def replace(source, target, _replace=os.replace):
        events.append("rename")
        _replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_atomically(tmp_path / "file", NEW)
    assert events == ["file", "rename", "folder"]


def test_an_error_leaves_the_old_file_alone(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    write_atomically(tmp_path / "file", OLD)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_permissions_and_links_stay(tmp_path):
    write_atomically(tmp_path / "file", OLD)
    (tmp_path / "file").chmod(0o600)
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", NEW)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == NEW
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_pipe_or_a_device_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_atomically(tmp_path / "pipe", b"news")
    reader.join()
    assert read == [b"news"]
    assert (tmp_path / "pipe").is_fifo()
    write_atomically(os.devnull, b"news")
    assert not Path(os.devnull).is_file()


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match="folder"):
        write_atomically(tmp_path, NEW)
    with pytest.raises(FileNotFoundError, match="missing"):
        write_atomically(tmp_path / "missing" / "file", NEW)


def test_many_new_files_are_written_and_synced_together(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    files = {tmp_path / name / f"{i}": f"{name}{i}".encode() for name in "ab" for i in range(3)}
    for folder in {path.parent for path in files}:
        folder.mkdir()
    write_new(files)
    assert {path: path.read_bytes() for path in files} == files
    assert set(synced[:6]) == {path.stat().st_ino for path in files}
    assert set(synced[6:]) == {path.parent.stat().st_ino for path in files}, "the folders after the files"
    with pytest.raises(CannotWrite, match="File exists"):
        write_new({tmp_path / "a" / "0": b"other"})
    assert (tmp_path / "a" / "0").read_bytes() == b"a0"
    write_new({})


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


def test_a_folder_or_file_that_cannot_be_written_is_found(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "missing" / "deeper")
    for check, path, message in (
        (check_folder, "/proc/self", "could not be written"),
        (check_folder, "/proc/nothing", "could not be written"),
        (check_folder, tmp_path / "file", "file cannot be a folder"),
        (check_folder, tmp_path / "file" / "below", "below"),
        (check_folder, tmp_path / "dangling", "dangling cannot be a folder"),
        (check_folder, tmp_path / "dangling" / "below", "below"),
        (check_file, "/proc/x.json", "could not be written"),
        (check_file, tmp_path, "is a folder; expected the path of a file"),
        (check_file, tmp_path / "file" / "x.json", "no folder .*file to write x.json into"),
        (check_file, tmp_path / "dangling", "no folder .*missing to write deeper into"),
    ):
        with pytest.raises(OSError, match=message):
            check(path)


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this platform has no /dev/full")
def test_a_full_device_is_named():
    with pytest.raises(CannotWrite, match="/dev/full could not be written: No space left on device"):
        write_atomically("/dev/full", b"text")


HOLD = """
import runpy, sys
with runpy.run_path(sys.argv[1])["exclusive"](sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""  # the file alone: to import the package takes seconds


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock until its input is closed, or it is killed."""
    command = [sys.executable, "-c", HOLD, atomic.__file__, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_holder_is_refused(tmp_path, holder):
    with pytest.raises(Busy, match="another process"), exclusive(tmp_path / "lock"):
        pass
    with pytest.raises(Busy, match="come back later"), exclusive(tmp_path / "lock", busy="come back later"):
        pass


def test_a_second_holder_can_wait(tmp_path, holder):
    order = []

    def hold():
        with exclusive(tmp_path / "lock", wait=True):
            order.append("held")

    waiting = threading.Thread(target=hold)
    waiting.start()
    waiting.join(0.05)
    assert not order
    order.append("released")
    holder.stdin.close()
    waiting.join()
    assert order == ["released", "held"]


def test_the_lock_of_a_killed_process_is_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with exclusive(tmp_path / "lock"):
        pass


def test_the_lock_is_free_after_an_error_and_the_file_keeps_its_content(tmp_path):
    (tmp_path / "lock").write_text("notes")
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path / "lock"):
        1 / 0  # noqa: B018
    with exclusive(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").read_text() == "notes"


def test_a_symbolic_link_as_lock_file_keeps_the_bytes_of_its_target(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"notes")
    (tmp_path / "lock").symlink_to(precious)
    for wait in (False, True):
        with pytest.raises(OSError, match="lock"), exclusive(tmp_path / "lock", wait=wait):
            pass
    assert precious.read_bytes() == b"notes"
