"""A norm rule from a file is played like any other; files that fail at import and rules that return NaN get words."""

from pathlib import Path

import pytest

from commands import assert_refused, message, succeeded, tribe_command
from tribe import norms
from tribe.experiments.parallel import custom_code
from tribe.experiments.store import finished

pytestmark = pytest.mark.usefixtures("few")
TINY = ("--set", "dataset.corruptions=('impulse_noise',)", "--set", "scenario.imbalance=1000000")
RULE = """
from dataclasses import dataclass
from typing import ClassVar
from tribe.norms import pool_batch

@dataclass(frozen=True)
class Halfway:
    share: float = 0.5
    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = True

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        centre, spread = pool_batch(mean, var, valid)
        return stats.mean + self.share * (centre - stats.mean), stats.var + self.share * (spread - stats.var), stats
"""
NAN = RULE.replace("stats.mean + self.share", 'float("nan") * self.share')


def play(rule, method="selftrain/robust-bn"):
    return tribe_command("run", *TINY, "--methods", method, "--set", f"{method}.rule={rule}")


def specs():
    return {result.experiment.id: result.experiment.method for result in finished("runs")}


def test_a_rule_from_a_file():
    Path("mine.py").write_text(RULE)
    succeeded(play("mine.py:Halfway(share=0.25)"))
    ((first, method),) = specs().items()
    assert method.fields["rule"] == "halfway(share=0.25)"
    assert method.code is not None, "its file counts"
    assert "found in runs, not computed again" in message(play("mine.py:Halfway(share=0.25)"))
    Path("mine.py").write_text(RULE + "# edited\n")
    succeeded(play("mine.py:Halfway(share=0.25)"))
    assert len(specs()) == 2, "an edited file is another experiment"
    succeeded(play("mixed(share=0.25)"))
    errors = {r.experiment.method.fields["rule"]: r.error() for r in finished("runs")}
    assert len(errors) == 2
    (experiment,) = (r.experiment for r in finished("runs") if r.experiment.id == first)
    (sent,) = custom_code(experiment)  # the method is part of tribe
    del norms.registry._classes["halfway"]
    sent._replace(file=Path("/nowhere/mine.py")).register()
    assert "halfway" in norms.names(), "as a worker on another machine has it"


def test_a_rule_that_returns_nan():
    Path("mine.py").write_text(NAN)
    assert_refused(play("mine.py:Halfway"), "the norm rule 'halfway' cannot be used")
    assert not list(finished("runs"))


def test_files_that_fail_at_import():
    Path("mine.py").write_text(RULE + "\nraise RuntimeError('no such thing')\n")
    line = len(Path("mine.py").read_text().splitlines())
    words = f"importing mine.py failed: RuntimeError: no such thing, at mine.py:{line}"
    for result in (
        play("mine.py:Halfway"),
        tribe_command("run", *TINY, "--methods", "mine.py:Mine"),
        tribe_command("sweep", *TINY, "--method", "mine.py:Mine", "--grid", "mine.lr=1"),
    ):
        assert_refused(result, words)
    assert not list(finished("runs"))


def test_what_is_in_the_file_but_no_rule():
    Path("mine.py").write_text("class Halfway: pass\n")
    assert "mine.py:Halfway is not a norm: expected a frozen dataclass with classes, observes" in message(
        play("mine.py:Halfway")
    )
