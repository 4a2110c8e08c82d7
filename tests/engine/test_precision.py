"""What a process does to the machine it runs on."""

import contextlib
import os
import platform
import subprocess
import sys
import threading

import pytest
import torch

from tribe.engine.precision import deterministic, float32_precision

ROUNDS = """
import resource
import torch
from tribe.engine.precision import keep_memory
{}
def round():
    return [torch.ones(6 << 20) for _ in range(4)]  # of 24 MB
round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(32):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(command=""):
    """Pages that the kernel had to bring while buffers were made and freed again and again.

    Left alone, glibc raises its threshold as buffers are freed, and whether it then gives them back depends on where
    the heap happens to lie. Told a threshold, it gives back every one, until it is told another.
    """
    code = [sys.executable, "-c", ROUNDS.format(command)]
    surroundings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    return int(subprocess.run(code, check=True, capture_output=True, text=True, env=surroundings).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_is_kept_needs_no_fresh_pages():
    assert 10 * faults("assert keep_memory()") < faults()


# -- switches that torch has once for all threads ---------------------------------------------------------------------


def algorithms():
    careful = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *careful, torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory


def float32():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision


class Other:
    """Another thread that is inside a scope until it is told to leave."""

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
def test_threads_share_a_scope_and_the_last_one_out_puts_things_back(name):
    """The first one out would switch off what the second still counts on, and the second what the first had set."""
    scope, now, within = SCOPES[name]
    before = now()
    assert before != within, "else nothing is tested"
    with contextlib.ExitStack() as stack:
        with scope():
            stack.enter_context(Other(scope()))
        assert now() == within, "the first is out, the other is still in"
    assert now() == before


def test_a_thread_is_refused_another_meaning_of_float32():
    before = float32()
    with float32_precision("float32"), Other(float32_precision("tf32")) as other:
        assert "one for all threads" in str(other.raised)
        assert float32() == ("ieee", "ieee")
    with Other(float32_precision("tf32")), float32_precision("tf32"):
        with pytest.raises(RuntimeError, match=r"computing with \('tf32', 'tf32'\)"), float32_precision("float32"):
            pass
        assert float32() == ("tf32", "tf32")
    assert float32() == before


def test_whoever_is_alone_may_change_the_meaning_of_float32_inside():
    before = float32()
    with float32_precision("tf32"):
        with float32_precision("float32"):
            with float32_precision("tf32"):
                assert float32() == ("tf32", "tf32")
            assert float32() == ("ieee", "ieee")
        assert float32() == ("tf32", "tf32")
    assert float32() == before


def test_an_error_inside_puts_things_back():
    before = algorithms()
    with pytest.raises(ZeroDivisionError), deterministic():
        raise ZeroDivisionError
    assert algorithms() == before
