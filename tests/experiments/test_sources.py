"""Code inside the package counts: a result whose component was edited in place is computed again, or named as stale."""

import json
import sys
import textwrap

import pytest

import tribe
from places import ROOT
from tribe import methods
from tribe.experiments import sources
from tribe.experiments.execution import run_experiment
from tribe.experiments.experiment import Experiment
from tribe.experiments.modules import from_file
from tribe.experiments.sources import code_digest, digest_of, sources_of
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import find, finished, keep, stale
from tribe.experiments.workbench import Workbench

DATA = ComponentSpec("live-mnist-c", {"corruptions": ["impulse_noise"]})
STREAM = ComponentSpec("gli-f", {"imbalance": 1_000_000})
MODULE = "tribe.methods.mine"
METHOD = '''
    """A method of the package."""

    from dataclasses import dataclass
    from typing import ClassVar

    from tribe.methods import register
    from tribe.methods.source import Source


    @register("mine")
    @dataclass(frozen=True)
    class Mine(Source):
        """Predicts {words}."""

        not_exportable_because: ClassVar = "turns predictions around"

        def step(self, net, state, x, valid=None, retired=None):
            logits, state = super().step(net, state, x, valid)
            return {sign}logits, state
'''

pytestmark = pytest.mark.filterwarnings("ignore:an imbalance of")


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """Write and load the file of a method of the package, as a new process would after an edit."""

    def load(**words):
        file = tmp_path / "mine.py"
        file.write_text(textwrap.dedent(METHOD.format(**words)))
        for cached in (sources._digest, sources._reached):
            cached.cache_clear()
        from_file(file, MODULE)
        monkeypatch.setattr(sources, "LOADED", file.stat().st_mtime)

    yield load
    sys.modules.pop(MODULE, None)
    methods.registry._classes.pop("mine", None)
    for cached in (sources._digest, sources._reached):
        cached.cache_clear()


def test_an_edit_in_place_is_computed_again(edit, few_digits, tmp_path):
    """Else the old number is returned under the same id; a docstring changes no number."""

    def play():
        workbench = Workbench(few_digits, device="cpu")
        experiment = Experiment.of(DATA, "compact", STREAM, "mine", workbench=workbench)
        return run_experiment(experiment, tmp_path / "runs", workbench=workbench)

    edit(sign="", words="as the source does")
    first = play()
    keep(tmp_path / "runs", tmp_path / "kept")
    finished_at = (first.folder / "metrics.json").stat().st_mtime_ns
    edit(sign="", words="as the network does")
    assert play().error() == first.error()
    assert (first.folder / "metrics.json").stat().st_mtime_ns == finished_at, "computed, although no code has changed"
    edit(sign="-", words="the opposite")
    assert stale(find(first.experiment, tmp_path / "runs")) == ["method"]
    assert find(first.experiment, tmp_path / "runs", current=True) is None
    with pytest.warns(UserWarning, match="the code of the method mine has changed since .* computed again"):
        second = play()
    assert second.experiment.id == first.experiment.id
    assert second.error() > first.error()
    assert not stale(second)
    keep(tmp_path / "runs", tmp_path / "kept")
    (kept,) = finished(tmp_path / "kept")
    assert kept.error() == second.error(), "a stale result does not stay"


@pytest.mark.parametrize("when", ["before its turn", "while it is computed"])
def test_a_result_of_code_that_was_edited_after_it_was_loaded_is_stale(when, edit, few_digits, tmp_path):
    """A process computes what it has loaded, not what is in the file by then."""
    workbench, after = Workbench(few_digits, device="cpu"), {"sign": "-", "words": "the opposite"}

    def save(*_):
        (tmp_path / "mine.py").write_text(textwrap.dedent(METHOD.format(**after)))

    edit(sign="", words="as the source does")
    experiment = Experiment.of(DATA, "compact", STREAM, "mine", workbench=workbench)
    if when == "before its turn":
        save()
    progress = save if when == "while it is computed" else None
    result = run_experiment(experiment, tmp_path / "runs", workbench=workbench, progress=progress)
    edit(**after)
    assert stale(result) == ["method"]


def test_a_checkpoint_of_other_code_is_not_resumed(edit, few_digits, tmp_path):
    stop = tmp_path / "checkpoint"

    def play(progress=None):
        workbench = Workbench(few_digits, device="cpu")
        parts = workbench.prepare(DATA, ComponentSpec("compact"), STREAM, ComponentSpec("mine"))
        stream = tribe.Stream(parts.dataset, parts.scenario, (0,), 64)
        return tribe.run(parts.net, parts.method, stream, spec={}, checkpoint=stop, every=1, progress=progress)

    def interrupt(done, of, wrong):
        if done == 2:
            raise KeyboardInterrupt

    edit(sign="", words="as the source does")
    with pytest.raises(KeyboardInterrupt):
        play(interrupt)
    edit(sign="-", words="the opposite")
    with pytest.raises(ValueError, match="is the checkpoint of another run"):
        play()


def test_results_say_of_which_code_they_are(few_digits, tmp_path):
    workbench = Workbench(few_digits, device="cpu")
    experiment = Experiment.of(DATA, "compact", STREAM, "tribe+time", workbench=workbench)
    code = run_experiment(experiment, tmp_path, workbench=workbench).environment["code"]
    assert {"dataset", "model", "scenario", "method"} <= code.keys()
    if (ROOT / ".git").exists():
        assert len(code["commit"]) == 40
        assert code["clean"] in (True, False)
    path = tmp_path / experiment.id / "environment.json"
    content = json.loads(path.read_text())
    del content["code"]
    path.write_text(json.dumps(content))
    assert find(experiment, tmp_path, current=True) is not None, "results from before digests stay valid"


def test_what_a_digest_covers():
    """A method, the norm rule and the methods that it builds on, the time filter around it; not the core."""
    from tribe.methods.petal import Petal
    from tribe.methods.rotta import Rotta

    assert sources._reached("tribe.methods.tribe") == {"tribe.methods.tribe", "tribe.norms.balanced"}
    assert sources._reached(Petal.__module__) == {"tribe.methods.petal", "tribe.methods.cotta"}
    assert digest_of(Rotta) != digest_of(Petal)
    assert digest_of(*methods.classes_of("tribe+time")) != digest_of(methods.get("tribe"))
    for name in sources.CORE:
        assert (ROOT / "src" / name.replace(".", "/")).exists() or (ROOT / f"src/{name.replace('.', '/')}.py").exists()


def test_noise_of_live_data_is_code_of_the_data_set(few_digits):
    workbench = Workbench(few_digits, device="cpu")
    one, other = (
        sources_of(
            Experiment.of(
                ComponentSpec("live-mnist-c", {"corruptions": [name]}), "compact", STREAM, "bn", workbench=workbench
            )
        )
        for name in ("fog", "impulse_noise")
    )
    assert one["method"] == other["method"]
    assert one.keys() == other.keys() == {"dataset", "model", "scenario", "method"}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x = 1", "x  =  1  # one", True),
        ('def f(a: int) -> int:\n    """Words."""\n    return a', "def f(a):\n    return a", True),
        ("x = 1", "x = 2", False),
        ("def f(a, b=1): return a", "def f(a, b=2): return a", False),
        ("x = f'{a}'", "x = f'{b}'", False),
        ("if a:\n    x = 1", "if a:\n    'a'\n    x = 1", False),
    ],
)
def test_a_digest_is_of_what_is_computed(one, other, same):
    assert (code_digest(one.encode()) == code_digest(other.encode())) is same
