"""The lock: one process at a time, released with the process, and no harm to the file."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tribe.io import files as lock
from tribe.io.files import Busy, exclusive, is_locked

HOLD = """
import runpy, sys
with runpy.run_path(sys.argv[1])["exclusive"](sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""  # the file alone: to import the package takes seconds


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock until its input is closed, or it is killed."""
    command = [sys.executable, "-c", HOLD, lock.__file__, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_holder_is_refused(tmp_path, holder):
    with pytest.raises(Busy, match=r"another process holds the lock .*lock"), exclusive(tmp_path / "lock"):
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
    with exclusive(tmp_path / "lock") as locked:
        assert locked


def test_the_lock_is_free_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path / "lock"):
        1 / 0  # noqa: B018
    with exclusive(tmp_path / "lock") as locked:
        assert locked


def test_the_file_keeps_its_content(tmp_path):
    (tmp_path / "lock").write_text("notes")
    with exclusive(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").read_text() == "notes"


def test_a_symbolic_link_as_lock_file_keeps_the_bytes_of_its_target(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"notes")
    (tmp_path / "lock").symlink_to(precious)
    before = precious.stat()
    with pytest.raises(OSError, match="lock"), exclusive(tmp_path / "lock"):
        pass
    assert precious.read_bytes() == b"notes"
    assert precious.stat() == before
    with pytest.raises(OSError, match="lock"), exclusive(tmp_path / "lock", wait=True):
        pass


@pytest.mark.parametrize("wait", [False, True])
def test_a_pipe_or_a_device_as_lock_file_is_refused_at_once(tmp_path, wait):
    """Opening a pipe waits for its other end, unless it is opened without waiting."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", os.devnull, "/dev/zero"):
        with pytest.raises(OSError, match="not a regular file"), exclusive(path, wait=wait):
            pass


def test_whether_a_file_is_locked(tmp_path, holder):
    assert is_locked(tmp_path / "lock")
    holder.kill()
    holder.wait()
    assert not is_locked(tmp_path / "lock")
    assert is_locked(tmp_path / "missing"), "a file that cannot be opened counts as locked"
    assert not (tmp_path / "missing").exists()


def test_links_and_pipes_are_refused(tmp_path):
    (tmp_path / "precious").write_text("notes")
    (tmp_path / "link").symlink_to("precious")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(OSError, match=name), exclusive(tmp_path / name):
            pass
    assert not (tmp_path / "nowhere").exists()
    assert (tmp_path / "precious").read_text() == "notes"
