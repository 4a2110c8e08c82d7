"""Workers of `tribe.experiments.parallel`: processes of this machine, or of a cluster of Ray.

A worker gets an experiment as plain data (`ExperimentJob`), with the files of a custom method or norm rule.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
import operator
import os
import platform
import queue
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tribe import methods, norms
from tribe._version import __version__
from tribe.experiments.execution import EVERY, ExperimentRunner
from tribe.experiments.experiment import Experiment
from tribe.experiments.provenance import from_file, is_ours
from tribe.experiments.runner import Progress
from tribe.experiments.store import Result, ResultStore
from tribe.experiments.workbench import Workbench
from tribe.io.files import Busy
from tribe.norms.named import find_class
from tribe.registry import Registry

INTERVAL = 0.2  # seconds between two reports of progress
CLEAR_ERRORS = (ValueError, OSError, ImportError, torch.OutOfMemoryError)  # messages without their type
ExperimentProgress = Callable[[Experiment, int, int, float | None], None]  # batches done, in all, error so far


class RunSettings(NamedTuple):
    """The settings of a computation; none of them changes a result."""

    root: str  # the folder of results
    every: int = EVERY  # batches between checkpoints
    force: bool = False  # compute what is there
    keep_outputs: bool = False  # keep logits in the records
    command: Sequence[str] | None = None  # the command line, kept with the results


class Reply(NamedTuple):
    """The end of an attempt: a result, or why there is none."""

    result: Result | None = None
    failed: str = ""
    busy: bool = False
    warnings: tuple[str, ...] = ()


def attempt(
    runner: ExperimentRunner, experiment: Experiment, settings: RunSettings, wait: bool, progress: Any
) -> Reply:
    """Run an experiment; an error is returned as a message."""
    options: Any = {"force": settings.force, "keep_outputs": settings.keep_outputs}
    try:
        return Reply(runner.run(experiment, progress=progress, wait=wait, **options))
    except Busy:
        return Reply(busy=True)
    except Exception as error:  # a custom method may raise anything; the others go on
        return Reply(failed=error_message(error) + _line_of(error, experiment))


def error_message(error: BaseException) -> str:
    """Return an error in one line."""
    message = " ".join(str(error).split())
    return message if isinstance(error, CLEAR_ERRORS) and message else f"{type(error).__name__}: {message}"


def _line_of(error: Exception, experiment: Experiment) -> str:
    """Return the last line of custom code that an error passed through; else the last line of an unexpected error."""
    frames = traceback.extract_tb(error.__traceback__)
    files = {str(custom.file) for custom in custom_code(experiment)}
    inside = [frame for frame in frames if str(Path(frame.filename).resolve()) in files]
    last = inside[-1:] or ([] if isinstance(error, CLEAR_ERRORS) else frames[-1:])
    return "".join(f" ({frame.filename}, line {frame.lineno})" for frame in last)


# -- what is sent to a worker -----------------------------------------------------------------------------------------


class CustomCode(NamedTuple):
    """A custom method, or the custom norm rule of a method, with the content of its file."""

    kind: Literal["method", "norm"]
    name: str  # in the registry
    module: str
    attribute: str
    file: Path
    content: bytes

    def register(self) -> None:
        """Register it in this process: from its package where that is installed, else from its file."""
        registry: Registry[Any] = methods.registry if self.kind == "method" else norms.registry
        if self.name in registry.names() and _content_of(registry.get(self.name)) == self.content:
            return
        find = operator.attrgetter(self.attribute)
        try:
            cls = find(importlib.import_module(self.module))
        except (ImportError, AttributeError):
            path = self.file
            if not path.is_file() or path.read_bytes() != self.content:
                path = Path(_folder().name) / hashlib.sha256(self.content).hexdigest() / path.name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(self.content)
            # The module is named by its path, so that a changed file replaces its older version in the registry.
            cls = find(from_file(path, f"tribe_{self.kind}_{hashlib.sha256(str(self.file).encode()).hexdigest()[:16]}"))
        if self.name not in registry.names():
            registry.register(self.name)(cls)


def custom_code(experiment: Experiment) -> tuple[CustomCode, ...]:
    """Return the custom norm rule and method of an experiment."""
    if experiment.method.code is None:
        return ()
    found = []
    rule = find_class(experiment.method.fields.get("rule"))
    for kind, cls in (("norm", rule), ("method", methods.get(experiment.method.name))):
        if cls is not None and not is_ours(cls):
            file = Path(inspect.getfile(cls)).resolve()
            name, content = str(getattr(cls, "name", "")), file.read_bytes()
            found.append(CustomCode(kind, name, cls.__module__, cls.__qualname__, file, content))  # type: ignore[arg-type]
    return tuple(found)


def _content_of(cls: type) -> bytes | None:
    try:
        return Path(inspect.getfile(cls)).read_bytes()
    except OSError:
        return None


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder for files that were sent; it is removed with the process."""
    return tempfile.TemporaryDirectory(prefix="tribe-methods-")


class ExperimentJob(NamedTuple):
    """All that a worker needs, in plain data."""

    spec: dict[str, Any]
    seeds: tuple[int, ...]
    settings: RunSettings
    wait: bool
    data: str | None
    weights: tuple[tuple[str, str], ...]
    custom: tuple[CustomCode, ...]
    versions: dict[str, str]  # of the sender
    node: str | None  # of the sender, on Ray


@dataclass
class Sender:
    """Makes jobs, and passes on the progress that workers report.

    The workers put progress into `queue`, which an engine sets.
    """

    settings: RunSettings
    workbench: Workbench | None
    progress: ExperimentProgress | None
    queue: Any = None
    _sent: dict[str, Experiment] = field(default_factory=dict)

    def job(self, experiment: Experiment, wait: bool, node: str | None = None) -> ExperimentJob:
        """Return the job of an experiment."""
        self._sent[experiment.id] = experiment
        data, weights = (None, {}) if self.workbench is None else (self.workbench.data, self.workbench.weights)
        return ExperimentJob(
            spec=experiment.json(),
            seeds=experiment.seeds,
            settings=self.settings._replace(root=str(Path(self.settings.root).absolute())),
            wait=wait,
            data=None if data is None else str(data.expanduser().resolve()),
            weights=tuple((name, str(path.expanduser().resolve())) for name, path in weights.items()),
            custom=custom_code(experiment),
            versions=versions(),
            node=node,
        )

    def show(self) -> None:
        """Pass on what workers have reported since the last call."""
        latest = {}
        with contextlib.suppress(queue.Empty, EOFError, OSError):
            while True:
                name, *report = self.queue.get_nowait()
                latest[name] = report
        for name, report in latest.items():
            if self.progress is not None:
                self.progress(self._sent[name], *report)


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    return {"tribe": __version__, "torch": torch.__version__}


# -- in a worker ------------------------------------------------------------------------------------------------------


def run_job(job: ExperimentJob, reports: Any) -> Reply:
    """Run a job; the message of an error names the machine."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            reply = _run_job(job, reports)
        except Exception as error:
            reply = Reply(failed=error_message(error))
    if reply.failed:
        reply = reply._replace(failed=f"on {platform.node()}: {reply.failed}")
    messages = (str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))
    return reply._replace(warnings=tuple(dict.fromkeys(messages)))


def _run_job(job: ExperimentJob, reports: Any) -> Reply:
    own = versions()
    if own != job.versions:
        differ = "; ".join(f"{n} is {own[n]}, not {v}" for n, v in job.versions.items() if own[n] != v)
        return Reply(failed=f"this worker would compute another result: {differ}. Install the same versions everywhere")
    for custom in job.custom:
        custom.register()
    experiment = Experiment.from_json(job.spec, job.seeds)
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)  # building a data set computes, too
    workbench = _workbench(job.data, experiment.device, job.weights)
    runner = ExperimentRunner(job.settings.root, workbench, job.settings.every, command=job.settings.command)
    reply = attempt(runner, experiment, job.settings, job.wait, _reporter(reports, experiment.id))
    if reply.result is None or (job.node is not None and job.node != _node()):
        return reply  # with the records: the sender may not share this folder
    return reply._replace(result=replace(reply.result, memory={}))


@functools.lru_cache(maxsize=2)
def _workbench(data: str | None, device: str, weights: tuple[tuple[str, str], ...]) -> Workbench:
    """Return the workbench of a worker: it runs many experiments, and reads data and networks once."""
    return Workbench(data, device, dict(weights))


def _reporter(reports: Any, name: str) -> Progress:
    """Return a function that reports the progress of an experiment, at intervals."""
    last = float("-inf")

    def report(done: int, of: int, wrong: float | None) -> None:
        nonlocal last
        if done == of or time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            with contextlib.suppress(Exception):  # a display must not cost a result
                reports.put((name, done, of, wrong))

    return report


def _node() -> str:
    return str(ray_library().get_runtime_context().get_node_id())


# -- engines ----------------------------------------------------------------------------------------------------------


_reports: list[Any] = []  # in a process of a pool: the queue that progress is reported to


def _keep_queue(reports: Any) -> None:
    """Keep the queue of a pool, which a process gets when it starts and not with a job."""
    _reports.append(reports)


def _run_job_of_pool(job: ExperimentJob) -> Reply:
    return run_job(job, _reports[0])


class PoolEngine:
    """Runs experiments in a pool of processes on this machine."""

    def __init__(self, sender: Sender, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers is how many processes run experiments, at least 1; got {workers}")
        self.slots, self._sender = workers, sender
        context = get_context("spawn")
        sender.queue = context.Queue()
        self._pool = ProcessPoolExecutor(workers, context, _keep_queue, (sender.queue,))

    def submit(self, experiment: Experiment, wait: bool) -> "Future[Reply]":
        """Send the experiment to a process."""
        return self._pool.submit(_run_job_of_pool, self._sender.job(experiment, wait))

    def receive(self, reply: Reply) -> Reply:
        """Return a reply as it is: the process wrote its result into the store."""
        return reply

    def show(self) -> None:
        """Pass on the progress of running attempts."""
        self._sender.show()

    def close(self) -> None:
        """Stop the processes; an experiment resumes from its checkpoint next time."""
        for process in list((self._pool._processes or {}).values()):
            process.terminate()
        self._pool.shutdown(cancel_futures=True)


class RayEngine:
    """Runs experiments on a cluster of Ray, one task each: in the caller's session, else in one that `close` ends."""

    slots = 2**20  # Ray queues tasks

    def __init__(self, sender: Sender, address: str, gpus: float) -> None:
        if gpus <= 0 or (gpus > 1 and gpus != int(gpus)):
            raise ValueError(f"gpus is a share of a GPU such as 0.25, or a whole number of them; got {gpus}")
        self._ray, self._sender, self._gpus = ray_library(), sender, gpus
        self._started = not self._ray.is_initialized()
        if self._started:
            _start_session(self._ray, address)
        self._store = ResultStore(sender.settings.root)
        self._tasks: list[Any] = []
        self._task = self._ray.remote(max_retries=0)(run_job)  # retries are counted in one place, `_run_until_done`
        sender.queue = importlib.import_module("ray.util.queue").Queue(actor_options={"num_cpus": 0})

    def submit(self, experiment: Experiment, wait: bool) -> "Future[Reply]":
        """Send the experiment to the cluster."""
        try:
            job = self._sender.job(experiment, wait, _node())
            task = self._task.options(**self._needs(experiment)).remote(job, self._sender.queue)
        except CLEAR_ERRORS as error:
            failed: Future[Reply] = Future()
            failed.set_result(Reply(failed=error_message(error)))
            return failed
        self._tasks.append(task)
        future: Future[Reply] = task.future()
        return future

    def receive(self, reply: Reply) -> Reply:
        """Write a result that came from another machine, unless its worker wrote into the same folder."""
        if reply.result is None or not reply.result.memory or self._store.find(reply.result.experiment) is not None:
            return reply
        result = replace(reply.result, root=self._store.root)
        self._store.add(result)
        return reply._replace(result=result)

    def _needs(self, experiment: Experiment) -> dict[str, Any]:
        """Return the resources of a task; never more cores than any machine has, since it would wait for ever."""
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        cores, accelerators = (max((m.get(kind, 0) for m in machines), default=0) for kind in ("CPU", "GPU"))
        if experiment.device == "cuda":
            if accelerators < self._gpus:
                raise ValueError(
                    f"it needs {self._gpus:g} of a GPU, but no machine of the cluster has more than {accelerators:g}"
                )
            return {"num_cpus": min(1, cores), "num_gpus": self._gpus}
        threads = experiment.threads or 1
        return {
            "num_cpus": min(threads, cores),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}},  # before any library starts its threads
        }

    def show(self) -> None:
        """Pass on the progress of running attempts."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # the queue was lost; the work goes on without it
            self._sender.show()

    def close(self) -> None:
        """Stop the running tasks, as when the caller is interrupted; they resume from their checkpoints next time."""
        for task in self._tasks:
            with contextlib.suppress(Exception):
                self._ray.cancel(task, force=True)
        with contextlib.suppress(Exception):
            self._sender.queue.shutdown(force=True)
        if self._started:
            self._ray.shutdown()


def _start_session(ray: Any, address: str) -> None:
    """Join a cluster, or start one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports unless the user wants them
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        ray.init(address="local", include_dashboard=False, **quiet)
        return
    place = os.environ.get("RAY_ADDRESS") if address == "auto" else address
    if place not in (None, "auto", "local"):
        _check_address(str(place))
    ray.init(address=place, **quiet)


def _check_address(address: str) -> None:
    """Refuse an address that does not answer: Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        hint = "expected auto, local, HOST:PORT of a cluster that runs, or ray://HOST:PORT"
        raise ConnectionError(f"no cluster of Ray at {address!r} ({error}); {hint}") from error


def ray_library() -> Any:
    """Return Ray, or raise an error that tells how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        message = "running on a cluster needs Ray, which is not installed: pip install 'tribe-tta[ray]'"
        raise ModuleNotFoundError(message) from error
