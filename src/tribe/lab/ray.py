"""Many experiments, one after the other or side by side on Ray, with the same results.

    outcomes = run_all(experiments, "runs")                    # here, in order
    outcomes = run_all(experiments, "runs", ray="auto")        # on a cluster, or on all cores of this machine
    [outcome for outcome in outcomes if isinstance(outcome, Failure)]

A worker gets an experiment as plain data and runs it as `Experiment.run` does here. Device and threads are part of an
experiment, so the numbers are the same, bit for bit, wherever it is run. What was finished before an interruption or a
failure stands, and what was under way goes on from its checkpoint when it is asked for again. Workers need tribe
installed; the folder of results may be shared by all machines, and if it is not, results are sent home.

Ray is the extra `ray`: ``pip install 'tribe-tta[ray]'``.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import operator
import os
import platform
import socket
import tempfile
import time
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from tribe import methods
from tribe._version import __version__
from tribe.lab.execution import EVERY, run_experiment
from tribe.lab.experiment import Experiment
from tribe.lab.modules import from_file
from tribe.lab.runner import Progress
from tribe.lab.store import ENVIRONMENT, METRICS, SPEC, Result, find, record_name
from tribe.lab.workbench import Workbench
from tribe.storage.atomic import write_atomically
from tribe.storage.lock import Busy

Follow = Callable[[Experiment, int, int, float | None], None]  # batches done, in all, error so far

BEAT = 0.2  # seconds between two looks at the workers, and between two words from one
WORDS = (ValueError, TypeError, OSError, ImportError)  # errors whose message says all; others are told with their kind


@dataclass(frozen=True)
class Failure:
    """An experiment that failed as often as it was tried, and why."""

    experiment: Experiment
    reason: str
    attempts: int

    def __str__(self) -> str:
        times = f"{self.attempts} times" if self.attempts > 1 else "once"
        spec = json.dumps(self.experiment.json(), sort_keys=True)
        return f"experiment {self.experiment.id} was tried {times} and failed: {self.reason}. It is {spec}"


def run_all(
    experiments: Iterable[Experiment],
    root: str | PathLike[str],
    *,
    ray: str | None = None,
    workers: int | None = None,
    workbench: Workbench | None = None,
    gpus: float = 0.25,
    retries: int = 2,
    every: int = EVERY,
    progress: Follow | None = None,
    done: Callable[[Experiment, Result | Failure], None] | None = None,
) -> list[Result | Failure]:
    """Run what is missing, and give the result of each in the order asked for, or why there is none.

    What fails is tried again after the others. What another process is computing is left for the end.

    Args:
        experiments: what to run.
        root: the folder of results.
        ray: None runs them here, one after the other; "auto" takes the cluster of $RAY_ADDRESS or of this machine, or
            starts one here; "local" always starts one; else the address of a cluster. A session of Ray that the caller
            has begun is used as it is.
        workers: start a cluster here, with as many cores; None: with all, if one is started.
        workbench: where data and weights are, on all workers; by default in each worker's own $TRIBE_DATA.
        gpus: share of a GPU that an experiment on CUDA takes on Ray; 0.25 lets four share one.
        retries: how often a failed experiment is tried again.
        every: batches between checkpoints.
        progress: called now and then, in this process, for whichever experiment went on.
        done: called once for each experiment, when it is finished or given up.
    """
    asked = list(experiments)
    _check(ray, workers, gpus, retries)
    with contextlib.ExitStack() as stack:
        pool: Pool
        if ray is None:
            pool = Here(root, workbench, every, progress)
        else:
            cluster = stack.enter_context(_cluster(ray, workers))
            pool = stack.enter_context(contextlib.closing(Workers(cluster, root, workbench, gpus, every, progress)))
        outcomes = _conduct(pool, list(dict.fromkeys(asked)), retries, done)
    return [outcomes[experiment] for experiment in asked]


def _check(ray: str | None, workers: int | None, gpus: float, retries: int) -> None:
    if workers is not None and workers < 1:
        raise ValueError(f"workers is how many cores a new cluster takes, at least 1; got {workers}")
    if workers is not None and ray not in ("auto", "local"):
        raise ValueError(f"workers is for a cluster that is started here, with ray 'auto' or 'local'; got ray={ray!r}")
    if gpus <= 0 or (gpus > 1 and gpus != int(gpus)):
        raise ValueError(f"gpus is a share of a GPU such as 0.25, or a whole number of them; got {gpus}")
    if retries < 0:
        raise ValueError(f"retries is how often a failed experiment is tried again, at least 0; got {retries}")


# -- the order of work ------------------------------------------------------------------------------------------------


Outcome = Result | Busy | str  # of one attempt; a string says what went wrong


class Pool(Protocol):
    """What attempts experiments."""

    def start(self, experiment: Experiment, wait: bool) -> None:
        """Take on an experiment; ``wait`` for another process that computes the same."""

    def next(self) -> tuple[Experiment, Outcome] | None:
        """The next attempt that ended; None if none is under way."""


def _conduct(
    pool: Pool,
    experiments: Sequence[Experiment],
    retries: int,
    done: Callable[[Experiment, Result | Failure], None] | None,
) -> dict[Experiment, Result | Failure]:
    """Let a pool attempt all experiments until each is finished or given up."""
    outcomes: dict[Experiment, Result | Failure] = {}
    reasons: dict[Experiment, list[str]] = defaultdict(list)
    queue, elsewhere, wait = list(experiments), list[Experiment](), False
    while queue:
        for experiment in queue:
            pool.start(experiment, wait)
        while (ended := pool.next()) is not None:
            experiment, outcome = ended
            if isinstance(outcome, Busy):
                elsewhere.append(experiment)
                continue
            if isinstance(outcome, str):
                reasons[experiment].append(outcome)
                if len(reasons[experiment]) <= retries:
                    pool.start(experiment, wait)
                    continue
                told = "; then ".join(dict.fromkeys(reasons[experiment]))
                outcomes[experiment] = Failure(experiment, told, len(reasons[experiment]))
            else:
                outcomes[experiment] = outcome
            if done is not None:
                done(experiment, outcomes[experiment])
        queue, elsewhere, wait = elsewhere, [], True
    return outcomes


def _attempt(
    experiment: Experiment, root: Path, workbench: Workbench, progress: Progress | None, every: int, wait: bool
) -> Outcome:
    try:
        return run_experiment(experiment, root, workbench=workbench, progress=progress, every=every, wait=wait)
    except Busy as busy:
        return busy
    except Exception as error:  # a method may be anyone's, and raise anything; the others go on
        return in_words(error) + _place(error, experiment)


def _place(error: Exception, experiment: Experiment) -> str:
    """Where an error was met in the file of a method that is not tribe's."""
    if experiment.method.code is None:
        return ""
    file = inspect.getfile(methods.get(experiment.method.name))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({file}, line {lines[-1]})" if lines else ""


def in_words(error: BaseException) -> str:
    """An error in a line."""
    words = " ".join(str(error).split())
    return words if isinstance(error, WORDS) and words else f"{type(error).__name__}: {words}"


class Here:
    """This process: one experiment after the other."""

    def __init__(
        self, root: str | PathLike[str], workbench: Workbench | None, every: int, progress: Follow | None
    ) -> None:
        self._root, self._every, self._progress = Path(root), every, progress
        self._given, self._benches = workbench, dict[str, Workbench]()
        self._queue: deque[tuple[Experiment, bool]] = deque()

    def start(self, experiment: Experiment, wait: bool) -> None:
        """Put it at the end of the queue."""
        self._queue.append((experiment, wait))

    def next(self) -> tuple[Experiment, Outcome] | None:
        """Run the first of the queue."""
        if not self._queue:
            return None
        experiment, wait = self._queue.popleft()
        follow = None if self._progress is None else functools.partial(self._progress, experiment)
        try:
            workbench = self._bench(experiment.device)
        except ValueError as error:  # no such device here
            return experiment, str(error)
        return experiment, _attempt(experiment, self._root, workbench, follow, self._every, wait)

    def _bench(self, device: str) -> Workbench:
        if self._given is not None:
            return self._given
        if device not in self._benches:
            self._benches[device] = Workbench(device=device)
        return self._benches[device]


# -- what travels -----------------------------------------------------------------------------------------------------


class Foreign(NamedTuple):
    """A method that is not tribe's, with the file it is in."""

    name: str
    module: str
    attribute: str
    file: str
    source: bytes

    @staticmethod
    def of(experiment: Experiment) -> "Foreign | None":
        """The method of an experiment, unless it is tribe's."""
        if experiment.method.code is None:
            return None
        cls = methods.get(experiment.method.name)
        file = Path(inspect.getfile(cls)).resolve()
        return Foreign(cls.name, cls.__module__, cls.__qualname__, str(file), file.read_bytes())

    def admit(self) -> None:
        """Make it known here: from its package where that is installed, else from its file."""
        if self.name in methods.names() and _bytes_of(methods.get(self.name)) == self.source:
            return
        find = operator.attrgetter(self.attribute)
        try:
            found = find(importlib.import_module(self.module))
        except (ImportError, AttributeError):
            found = find(self._imported())
        if self.name not in methods.names():
            methods.register(self.name)(found)

    def _imported(self) -> ModuleType:
        path = Path(self.file)
        if not path.is_file() or path.read_bytes() != self.source:
            path = Path(_folder().name) / hashlib.sha256(self.source).hexdigest() / path.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(self.source)
        # ComponentSpec by its place, so that a file that was changed takes the place of its older self in the registry.
        return from_file(path, f"tribe_method_{hashlib.sha256(self.file.encode()).hexdigest()[:16]}")


def _bytes_of(cls: type) -> bytes | None:
    try:
        return Path(inspect.getfile(cls)).read_bytes()
    except OSError:
        return None


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder for files that came over the wire; removed with the process."""
    return tempfile.TemporaryDirectory(prefix="tribe-methods-")


class Order(NamedTuple):
    """All that a worker must know, in plain data."""

    spec: dict[str, Any]
    root: str
    data: str | None
    weights: tuple[tuple[str, str], ...]
    method: Foreign | None
    versions: dict[str, str]  # of the one who orders
    node: str  # where the one who orders is
    every: int
    wait: bool


class Reply(NamedTuple):
    """What a worker has to say, in plain data: an error of a foreign class could not be read where it is unknown."""

    failed: str | None = None
    busy: bool = False
    warned: tuple[str, ...] = ()
    files: Mapping[str, bytes] = {}  # results, if they may lie on another machine


def _versions() -> dict[str, str]:
    return {"tribe": __version__, "torch": torch.__version__}


# -- in a worker ------------------------------------------------------------------------------------------------------


def _serve(order: Order, board: Any) -> Reply:
    """Carry out an order. What goes wrong is told with the name of the machine."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            reply = _carry_out(order, board)
        except Exception as error:
            reply = Reply(in_words(error))
    if reply.failed is not None:
        reply = reply._replace(failed=f"on {platform.node()}: {reply.failed}")
    told = (str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))
    return reply._replace(warned=tuple(dict.fromkeys(told)))


def _carry_out(order: Order, board: Any) -> Reply:
    here = _versions()
    if here != order.versions:
        differ = "; ".join(f"{n} is {here[n]}, not {v}" for n, v in order.versions.items() if here[n] != v)
        return Reply(f"this worker would compute something else: {differ}. Install the same versions everywhere")
    if order.method is not None:
        order.method.admit()
    experiment = Experiment.from_json(order.spec)
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)  # building a data set computes, too
    voice = _Voice(board, experiment.id)
    workbench = _bench(order.data, experiment.device, order.weights)
    outcome = _attempt(experiment, Path(order.root), workbench, voice, order.every, order.wait)
    voice.finish()
    if isinstance(outcome, Busy):
        return Reply(busy=True)
    if isinstance(outcome, str):
        return Reply(outcome)
    away = _library().get_runtime_context().get_node_id() != order.node
    return Reply(files=_packed(outcome) if away else {})


@functools.lru_cache(maxsize=2)
def _bench(data: str | None, device: str, weights: tuple[tuple[str, str], ...]) -> Workbench:
    """A worker plays many experiments: data and networks are read once."""
    return Workbench(data, device, dict(weights))


def _packed(result: Result) -> dict[str, bytes]:
    """The files of a result in the order in which they are to be written: metrics.json last, since it says "whole"."""
    records = (record_name(seed) for seed in result.experiment.seeds)
    paths = (result.folder / name for name in (SPEC, ENVIRONMENT, *records, METRICS))
    return {path.name: path.read_bytes() for path in paths if path.exists()}


class _Voice:
    """What a worker tells the board of its experiment: now and then, and the end."""

    def __init__(self, board: Any, experiment: str) -> None:
        self._board, self._experiment = board, experiment
        self._spoke, self._last = float("-inf"), None

    def __call__(self, done: int, of: int, wrong: float | None) -> None:
        if done == of or time.monotonic() - self._spoke >= BEAT:
            self._spoke = time.monotonic()
            self._last = self._board.tell.remote(self._experiment, done, of, wrong)

    def finish(self) -> None:
        """Wait until the last word has arrived: who hears that a task ended has then heard all of it."""
        with contextlib.suppress(Exception):  # no display is worth a result
            if self._last is not None:
                _library().get(self._last, timeout=10)


class _Board:
    """The latest word of every worker, for the one display; an actor of Ray."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, int, float | None]] = {}

    def tell(self, experiment: str, done: int, of: int, wrong: float | None) -> None:
        self._latest[experiment] = done, of, wrong

    def take(self) -> dict[str, tuple[int, int, float | None]]:
        latest, self._latest = self._latest, {}
        return latest


# -- at the driver ----------------------------------------------------------------------------------------------------


def _library() -> Any:
    """Ray, or what to do without it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        message = "running on several workers needs Ray, which is not installed: pip install 'tribe-tta[ray]'"
        raise ModuleNotFoundError(message) from error


@contextlib.contextmanager
def _cluster(address: str, workers: int | None) -> Iterator[Any]:
    """A session of Ray: the caller's if there is one, else one that ends with the work."""
    ray = _library()
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone unless the user wants it
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if workers is not None or address == "local":
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    else:
        known = os.environ.get("RAY_ADDRESS") if address == "auto" else address
        if known not in (None, "auto", "local"):
            _knock(str(known))
        ray.init(address=known, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Refuse an address where nobody answers: Ray itself would go on trying for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        hint = "expected auto, local, HOST:PORT of a cluster that runs, or ray://HOST:PORT"
        raise ConnectionError(f"there is no cluster of Ray at {address!r} ({error}); {hint}") from error


class Workers:
    """The workers of a cluster: one task an experiment."""

    def __init__(
        self,
        ray: Any,
        root: str | PathLike[str],
        workbench: Workbench | None,
        gpus: float,
        every: int,
        progress: Follow | None,
    ) -> None:
        self._ray, self._root, self._gpus = ray, Path(root).resolve(), gpus
        self._every, self._progress = every, progress
        self._data = None if workbench is None or workbench.data is None else str(workbench.data.expanduser().resolve())
        places = {} if workbench is None else workbench.weights
        self._weights = tuple((name, str(path.expanduser().resolve())) for name, path in places.items())
        self._node = ray.get_runtime_context().get_node_id()
        self._task = ray.remote(max_retries=0)(_serve)  # retries are counted in one place, `_conduct`
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
        self._waiting: dict[Any, Experiment] = {}
        self._ended: deque[tuple[Experiment, Outcome]] = deque()

    def start(self, experiment: Experiment, wait: bool) -> None:
        """Send the experiment to a worker, unless its results are here."""
        try:
            if (found := find(experiment, self._root, verified=True)) is not None:
                self._ended.append((experiment, found))
                return
            order = Order(
                experiment.json(),
                str(self._root),
                self._data,
                self._weights,
                Foreign.of(experiment),
                _versions(),
                self._node,
                self._every,
                wait,
            )
            task = self._task.options(**self._needs(experiment)).remote(order, self._board)
        except WORDS as error:
            self._ended.append((experiment, in_words(error)))
        else:
            self._waiting[task] = experiment

    def _needs(self, experiment: Experiment) -> dict[str, Any]:
        """What a task asks of a machine; never more cores than any has, since then it would wait for ever."""
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

    def next(self) -> tuple[Experiment, Outcome] | None:
        """Wait until a task has ended, and show what all of them tell meanwhile."""
        while not self._ended and self._waiting:
            ended, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=BEAT)
            self._show()
            for task in ended:
                experiment = self._waiting.pop(task)
                self._ended.append((experiment, self._outcome(experiment, task)))
        return self._ended.popleft() if self._ended else None

    def _show(self) -> None:
        if self._progress is None:
            return
        try:
            latest = self._ray.get(self._board.take.remote(), timeout=10)
        except self._ray.exceptions.RayError:  # a board that was lost comes back, and the work goes on without it
            return
        named = {experiment.id: experiment for experiment in self._waiting.values()}
        for name, told in latest.items():
            if name in named:
                self._progress(named[name], *told)

    def _outcome(self, experiment: Experiment, task: Any) -> Outcome:
        try:
            reply: Reply = self._ray.get(task)
        except self._ray.exceptions.RayError as error:  # the worker died, or never came to life
            return in_words(getattr(error, "cause", None) or error)
        for words in reply.warned:
            warnings.warn(words, stacklevel=2)
        if reply.busy:
            return Busy(experiment.id)
        if reply.failed is not None:
            return reply.failed
        return _brought_home(experiment, self._root, reply.files)

    def close(self) -> None:
        """Stop what is still under way, as when the driver is interrupted; it goes on from its checkpoint next time."""
        for task in self._waiting:
            with contextlib.suppress(Exception):
                self._ray.cancel(task, force=True)
        with contextlib.suppress(Exception):
            self._ray.kill(self._board)


def _brought_home(experiment: Experiment, root: Path, files: Mapping[str, bytes]) -> Outcome:
    """The results in the folder here, which a worker on another machine may not see."""
    folder = root / experiment.id
    found = find(experiment, root, verified=True)
    if found is None and files:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
        found = find(experiment, root, verified=True)
    return found or f"a worker finished it, but its results are not in {folder}"
