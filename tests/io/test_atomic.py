"""Atomic writes: a kill at any point leaves the old file or the new one."""

import contextlib
import os
import resource
import signal
import stat
import sys
import threading
import time
from itertools import count, groupby
from pathlib import Path

import pytest

from tribe.io import files as atomic
from tribe.io.files import CannotWrite, open_atomically, write_atomically, write_new

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
        atomic._swept.discard(tmp_path)

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


def test_stale_temporary_files_are_removed_and_a_folder_is_listed_once(tmp_path, monkeypatch):
    stale, fresh, other = (tmp_path / name for name in (f".a.{'0' * 16}.tmp", f".a.{'1' * 16}.tmp", ".notes.tmp"))
    for path in (stale, fresh, other):
        path.write_bytes(b"half")
    for path in (stale, other):
        os.utime(path, (0, 0))
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: listed.append(folder) or scandir(folder))
    for name in "aab":
        write_atomically(tmp_path / name, NEW)
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", fresh.name, other.name}
    assert listed == [tmp_path]


def test_the_temporary_file_of_a_live_writer_is_not_removed(tmp_path, monkeypatch):
    """Neither by a writer whose clock is an hour ahead, nor after hours of writing."""
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 7200)
    with open_atomically(tmp_path / "slow") as file:
        file.write(NEW)
        file.flush()
        atomic._swept.clear()
        write_atomically(tmp_path / "ahead", NEW)
        (temporary,) = tmp_path.glob(".slow.*.tmp")
        os.utime(temporary, (0, 0))
        atomic._swept.clear()
        write_atomically(tmp_path / "later", NEW)
    assert (tmp_path / "slow").read_bytes() == NEW
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ahead", "later", "slow"]


def test_an_error_leaves_the_old_file_alone(tmp_path):
    write_atomically(tmp_path / "file", OLD)
    with contextlib.suppress(KeyboardInterrupt), open_atomically(tmp_path / "file") as file:
        file.write(NEW)
        raise KeyboardInterrupt
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
    with pytest.raises(IsADirectoryError, match="is a folder; expected the path of a file"):
        write_atomically(tmp_path, NEW)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing to write file into"):
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
