"""Fixtures and hooks of all tests. One thread: the networks are so small that a second one only waits for the first.

With TRIBE_SKIPS in the environment, a test may be skipped only for a reason that matches this regular expression; any
other skip fails the session. Continuous integration sets it, so that a missing package or program is noticed.
"""

import asyncio
import gc
import inspect
import os
import re

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start


@pytest.fixture(scope="module")
def browser():
    """A real chromium, for the pages of a module."""
    from browsers import started_chromium

    with started_chromium() as started:
        yield started


def pytest_collection_modifyitems(items):
    """Skip the tests that need a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish():
    """Let the garbage collector look at what tests make, and not at ten thousand tests and all modules each time."""
    gc.collect()
    gc.freeze()


def pytest_pyfunc_call(pyfuncitem):
    """Run an async test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**given))
    return True


class SkipCheck:
    """Collect the skips whose reason is not allowed, and fail the session for them."""

    def __init__(self, allowed):
        self.allowed, self.refused = re.compile(allowed), []

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if not self.allowed.search(reason):
                self.refused.append(f"{report.nodeid}: {reason}")

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self, session):
        if self.refused:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.refused:
            terminalreporter.write_line(f"SKIP NOT ALLOWED {line}", red=True)


def pytest_configure(config):
    allowed = os.environ.get("TRIBE_SKIPS")
    if allowed and not hasattr(config, "workerinput"):  # under xdist the controller gets the reports of all workers
        config.pluginmanager.register(SkipCheck(allowed))


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No data but what the package brings, and an empty folder to write into."""
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def registries(monkeypatch):
    """Components that a test registers are gone after it."""
    from tribe import datasets, filters, methods, norms, scenarios

    for kind in (datasets, filters, methods, norms, scenarios):
        kind.registry.names()  # those of the package are there first
        monkeypatch.setattr(kind.registry, "_classes", dict(kind.registry._classes))


@pytest.fixture
def few(nowhere, registries, few_digits, monkeypatch):
    """An empty folder to write into, a few digits in place of the package's own, and registries of the test's own."""
    monkeypatch.setenv("TRIBE_DATA", few_digits)


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory):
    """A folder with the first 2,000 of MNIST's test images: streams of them are a fifth as long as those of all."""
    from layouts import write_digits

    return write_digits(tmp_path_factory.mktemp("digits"), train=0, test=2000)
