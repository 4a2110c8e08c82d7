"""Settings of torch and of the process: memory, deterministic algorithms, the meaning of float32."""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

from tribe.core.precision import deterministic, float32_precision, keep_memory

BUFFER = """
import ctypes

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

glibc = ctypes.CDLL(None)
glibc.malloc.restype, glibc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
glibc.free.argtypes, glibc.mallinfo2.restype = [ctypes.c_void_p], Heap
{}
before = glibc.mallinfo2()
buffer = glibc.malloc(24 << 20)
during = glibc.mallinfo2()
glibc.free(buffer)
print(during.hblks - before.hblks, glibc.mallinfo2().fordblks >= 24 << 20)
"""


def allocator(command=""):
    """What glibc does with a buffer of 24 MB: how many blocks it maps for it, and whether it keeps it when it is freed.

    glibc raises its default threshold as buffers are freed. A threshold from the environment stays.
    """
    code = [sys.executable, "-c", BUFFER.format(command)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    return subprocess.run(code, check=True, capture_output=True, text=True, env=environment).stdout.split()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_memory_that_is_freed_is_kept():
    assert allocator() == ["1", "False"]
    assert allocator("from tribe.core.precision import keep_memory; assert keep_memory()") == ["0", "True"]


def test_without_glibc_memory_is_not_kept(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_memory()


def algorithms():
    chosen = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *chosen, torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory


def float32():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision


class Other:
    """Another thread, which is inside a scope until the end of the with block."""

    def __init__(self, scope):
        self.inside, self.leaving, self.raised = threading.Event(), threading.Event(), None
        self.thread = threading.Thread(target=self.stay, args=(scope,))

    def stay(self, scope):
        try:
            with scope:
                self.inside.set()
                assert self.leaving.wait(30)
        except RuntimeError as error:
            self.raised = error
            self.inside.set()

    def __enter__(self):
        self.thread.start()
        assert self.inside.wait(30)
        return self

    def __exit__(self, *_):
        self.leaving.set()
        self.thread.join(30)


SCOPES = {
    "deterministic": (deterministic, algorithms, (True, True, False, False)),
    "float32": (lambda: float32_precision("float32"), float32, ("ieee", "ieee")),
    "tf32": (lambda: float32_precision("tf32"), float32, ("tf32", "tf32")),
}


@pytest.mark.parametrize("name", SCOPES)
def test_threads_share_a_scope_and_the_last_one_out_restores_the_flags(name):
    """Catches a first thread that resets the flags while a second is inside, or a second that restores the first's."""
    scope, now, within = SCOPES[name]
    before = now()
    assert before != within, "the test needs a difference"
    with contextlib.ExitStack() as stack:
        with scope():
            stack.enter_context(Other(scope()))
        assert now() == within, "the first is out, the other is still in"
    assert now() == before


def test_another_thread_cannot_change_the_meaning_of_float32():
    before = float32()
    with float32_precision("float32"), Other(float32_precision("tf32")) as other:
        assert "one for all threads" in str(other.raised)
        assert float32() == ("ieee", "ieee")
    with Other(float32_precision("tf32")), float32_precision("tf32"):
        with pytest.raises(RuntimeError, match="computing"), float32_precision("float32"):
            pass
        assert float32() == ("tf32", "tf32")
    assert float32() == before


def test_one_thread_may_nest_both_meanings_of_float32():
    before = float32()
    with float32_precision("tf32"):
        with float32_precision("float32"):
            with float32_precision("tf32"):
                assert float32() == ("tf32", "tf32")
            assert float32() == ("ieee", "ieee")
        assert float32() == ("tf32", "tf32")
    assert float32() == before


def test_an_error_inside_restores_the_flags():
    before = algorithms()
    with pytest.raises(ZeroDivisionError), deterministic():
        raise ZeroDivisionError
    assert algorithms() == before
