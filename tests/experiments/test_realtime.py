"""Real time: the runner under a clock equals a slow loop from the definition, for all methods, resumed or not."""

import json
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from test_runner import Fixed, Memory

from commands import assert_refused, succeeded, tribe_command
from grid import Stopped, run_experiment, same, small, stop_at
from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import leaves
from tribe.experiments.bench import costs
from tribe.experiments.experiment import Experiment
from tribe.experiments.realtime import Realtime, predict_last
from tribe.experiments.runner import run
from tribe.experiments.store import finished
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Workbench
from tribe.io.states import StateFileError
from tribe.methods import Pipeline
from tribe.testing import images, ready, small_network
from tribe.testing.shared import small as smaller

CLOCK = Realtime(speed=2, cost=1.3)
NAMES = [*methods.names(), "tribe+time", "lame+time", "tribe+guard+time", "tribe+rare+time"]


@dataclass(frozen=True)
class Shifted(Fixed):
    """A scenario whose streams are also cut at other places with the seed."""

    def schedule(self, labels, seed):
        return replace(self, reset_at=tuple(r - 9 * seed for r in self.reset_at))._of(labels, seed)

    def _of(self, labels, seed):
        return super().schedule(labels, seed)


def stream_of(seeds=(0,), resets=()):
    return Stream(Memory(), Shifted(reset_at=resets), seeds, batch=16)


def play(name, seeds=(0,), resets=(), clock=CLOCK, **options):
    method = smaller(ready(name))
    return run(Backbone(small_network()), method, stream_of(seeds, resets), realtime=clock, **options)


def plain_taken(sizes, speed, cost):
    """Watch every image arrive: a method that is free before the image is there takes the batch that it is in.

    The clock shows the time of plain inference of one image.
    """
    speed, cost = Fraction(speed), Fraction(cost)
    busy_until, image, taken = Fraction(0), 0, []
    for size in sizes:
        took = False
        for _ in range(size):
            begins, ends = image / speed, (image + 1) / speed
            if not took and busy_until < ends:
                took = True
                busy_until = max(busy_until, begins) + cost * size
            image += 1
        taken.append(took)
    return taken


def plain_loop(name, speed, cost, resets=()):
    """Play the only stream, batch after batch, with what a method defines; return predictions and confidences."""
    net, method = Backbone(small_network()), smaller(ready(name))
    stream, state, outputs = stream_of(resets=resets), method.init(net, 1, 0), []
    batches = list(stream)
    for batch, took in zip(batches, plain_taken([b.x.shape[1] for b in batches], speed, cost), strict=True):
        if batch.reset.any():
            state = method.init(net, 1, 0)
        if took:
            output, state = method.step(net, state, batch.x, batch.valid)
        else:
            with torch.no_grad():
                output = method.deployed(net, state).logits(net, batch.x, batch.valid)
            if isinstance(method, Pipeline) and method.filter is not None:
                output, after = method.filter_output(net, state.filter, output, batch.valid)
                state = state._replace(filter=after)
        outputs.append(output.softmax(-1)[0])
    confidence, prediction = torch.cat(outputs).max(-1)
    return prediction, confidence


@pytest.mark.parametrize("name", NAMES)
def test_the_runner_equals_a_plain_loop(name):
    (record,) = play(name)
    prediction, confidence = plain_loop(name, CLOCK.speed, CLOCK.cost)
    assert torch.equal(record.prediction, prediction)
    assert torch.equal(record.confidence, confidence)


@pytest.mark.parametrize(("speed", "cost"), [(1, 1), (1, 2.5), (0.5, 3), (4, 7.25), (1, 60)])
def test_it_equals_the_loop_at_other_speeds_and_with_resets(speed, cost):
    """A reset counts for a batch that is not taken, too."""
    (record,) = play("tribe", resets=(0, 50), clock=Realtime(speed, cost))
    prediction, confidence = plain_loop("tribe", speed, cost, resets=(0, 50))
    assert torch.equal(record.prediction, prediction)
    assert torch.equal(record.confidence, confidence)


@pytest.mark.parametrize("sizes", [[64] * 200, [64, 1, 7, 64, 64, 3] * 40, [1] * 300], ids=["full", "cut", "ones"])
@pytest.mark.parametrize("speed", [0.5, 1, 2, 4])
def test_it_takes_its_share_and_no_more(sizes, speed):
    for cost in (0.1, 1, 1.1, 2, 2.5, 7.25, 31.7):
        clock = Realtime(speed, cost)
        taken = clock.taken(sizes)
        assert taken == plain_taken(sizes, speed, cost)
        assert taken[: len(sizes) // 3] == clock.taken(sizes[: len(sizes) // 3]), "it does not know the future"
        share = sum(size for size, took in zip(sizes, taken, strict=True) if took) / sum(sizes)
        assert abs(share - clock.share) * sum(sizes) <= 2 * max(sizes) or len(set(sizes)) > 1
        assert all(taken) or speed * cost > 1


def test_a_method_that_keeps_up_is_as_without_a_clock():
    fast = play("tribe", seeds=(0, 1), clock=Realtime(0.1, 7.25))
    assert same(fast, play("tribe", seeds=(0, 1), clock=None))
    assert not same(fast, play("tribe", seeds=(0, 1)))


@pytest.mark.parametrize("name", ["tribe", "lame", "rotta", "cotta", "tribe+guard+time"])
def test_streams_do_not_meet(name):
    """Of other lengths and with other cuts, so that one is busy while another takes its batch."""
    seeds = (0, 1, 3)
    stream = stream_of(seeds, resets=(40, 70))
    plan = CLOCK.plan(stream)
    live = torch.tensor([[step < len(cuts) for cuts in stream.cuts] for step in range(len(stream))])
    assert ((plan & live).any(1) & (~plan & live).any(1)).any()
    together = play(name, seeds, resets=(40, 70))
    for seed, record in zip(seeds, together, strict=True):
        (alone,) = play(name, (seed,), resets=(40, 70), seed=seeds.index(seed))
        assert same([record], [alone], ("domain", "label", "prediction"))
        assert torch.allclose(record.confidence, alone.confidence, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_state_is_not_changed_by_predicting(name):
    net, method = Backbone(small_network()), smaller(ready(name))
    _, state = method.step(net, method.init(net, 2, 0), images(2, 6))
    before = {place: t.clone() for place, t in leaves(state).items()}
    _, after = predict_last(net, method, state, images(2, 6))
    assert all(torch.equal(before[place], t) for place, t in leaves(state).items())
    moved = {place for place, t in leaves(after).items() if not torch.equal(before[place], t)}
    assert all(place.startswith("filter") for place in moved)
    assert bool(moved) == name.endswith("+time")


def test_the_last_state_of_lame_is_the_source():
    net, method, x = Backbone(small_network()), ready("lame"), images(1, 16)
    output, _ = predict_last(net, method, method.init(net), x)
    source = ready("source")
    assert torch.equal(output, source.predict(net, source.init(net), x))
    assert not torch.allclose(output, method.predict(net, method.init(net), x))


@pytest.mark.parametrize("name", ["tribe", "lame", "rotta", "cotta", "tribe+guard+time"])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path, name):
    path, whole = tmp_path / "run.safetensors", play(name, (0, 1))
    for batch in (3, 4, 5):
        with pytest.raises(Stopped):
            play(name, (0, 1), checkpoint=path, every=1, progress=stop_at(batch))
    for other in (None, Realtime(2, 1.4), Realtime(2.1, 1.3)):
        with pytest.raises(StateFileError, match="another run"):
            play(name, (0, 1), checkpoint=path, clock=other)
    assert same(whole, play(name, (0, 1), checkpoint=path))


def test_the_record_names_the_clock():
    assert play("source")[0].spec["realtime"] == {"speed": 2, "cost": 1.3}
    assert "realtime" not in play("source", clock=None)[0].spec


@pytest.mark.parametrize("fields", [{"speed": 0}, {"speed": -1}, {"speed": float("nan")}, {"cost": 0}, {"cost": "7"}])
def test_a_clock_that_stands_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Realtime(**{"speed": 1, "cost": 1, **fields})


# -- experiments and the command -----------------------------------------------------------------------------------

pytestmark = pytest.mark.filterwarnings("ignore:an imbalance of")
TINY = ("--set", "dataset.corruptions=('impulse_noise',)", "--set", "scenario.imbalance=1000000", "--set", "batch=16")


def tribe_run(*arguments):
    return tribe_command("run", *TINY, *arguments)


def write_costs(path, **given):
    path.write_text(json.dumps(given))
    return path


def results(folder):
    """The results in a folder by method and speed."""
    found = {}
    for result in finished(folder):
        clock = result.experiment.realtime
        found[result.experiment.method.name, clock and clock.speed] = result
    return found


def test_the_id_includes_the_clock(few_digits):
    plain = small(Workbench(few_digits, device="cpu"), "tribe")
    clocked = replace(plain, realtime=CLOCK)
    assert "realtime" not in plain.json()
    ids = {replaced.id for replaced in (plain, clocked, replace(plain, realtime=Realtime(2, 1.4)))}
    assert len(ids) == 3
    assert Experiment.from_json(json.loads(json.dumps(clocked.json()))) == clocked


@pytest.mark.parametrize(
    ("clock", "word"),
    [
        ({"speed": 2}, "cost"),
        ({"speed": 2, "cost": 0}, "cost"),
        ({**CLOCK.json(), "price": 1}, "price"),
        ([], "realtime"),
    ],
)
def test_a_damaged_clock_in_a_spec_is_refused(few_digits, clock, word):
    spec = small(Workbench(few_digits, device="cpu")).json()
    with pytest.raises(ValueError, match=word):
        Experiment.from_json({**spec, "realtime": clock})


def test_an_experiment_that_was_stopped_or_read_from_json_ends_the_same(few_digits, tmp_path):
    experiment = replace(small(Workbench(few_digits, device="cpu"), "tribe"), realtime=CLOCK)
    whole = run_experiment(experiment, tmp_path / "whole")
    with pytest.raises(Stopped):
        run_experiment(experiment, tmp_path / "runs", every=2, progress=stop_at(5))
    read = Experiment.from_json(experiment.json())
    resumed = run_experiment(read, tmp_path / "runs", workbench=Workbench(few_digits, device="cpu"))
    assert same(whole.records(), resumed.records())


@pytest.mark.usefixtures("few")
def test_given_costs_make_the_same_result_again(few_digits, tmp_path):
    given = write_costs(tmp_path / "given.json", tribe=3, source=1.0, bn=1.5)
    options = ("--realtime", "--costs", given, "--methods", "source,tribe", "--data", few_digits, "--json", "-")
    first = succeeded(tribe_run(*options, "--out", tmp_path / "one"))
    report = json.loads(first.stdout)
    assert report["spec"]["realtime"] == {"speed": 1, "costs": {"source": 1, "tribe": 3}}
    (tmp_path / "summary.json").write_text(first.stdout)
    again = ("--realtime", "1", "--costs", tmp_path / "summary.json", *options[3:])
    assert [row["id"] for row in json.loads(succeeded(tribe_run(*again, "--out", tmp_path / "two")).stdout)["results"]]
    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert one.keys() == two.keys() == {("source", 1), ("tribe", 1)}
    for key, result in one.items():
        assert result.experiment == two[key].experiment
        assert same(result.records(), two[key].records())
        assert result.metrics == two[key].metrics


@pytest.mark.usefixtures("few")
def test_costs_are_measured_once_and_replayed(few_digits, tmp_path):
    options = ("--methods", "source,tent", "--data", few_digits, "--out", tmp_path)
    succeeded(tribe_run("--realtime", *options))
    path = tmp_path / costs.FILE
    measured = json.loads(path.read_text())
    assert {entry["method"] for entry in measured.values()} == {"source", "tent"}
    assert all(entry["cost"] > 0 and entry["machine"]["torch"] for entry in measured.values())
    for entry in measured.values():
        entry["cost"] = {"source": 1.25, "tent": 40.0}[entry["method"]]
    path.write_text(json.dumps(measured))
    succeeded(tribe_run("--realtime", "2", *options))
    assert json.loads(path.read_text()) == measured
    assert {key: result.experiment.realtime.cost for key, result in results(tmp_path).items() if key[1] == 2} == {
        ("source", 2): 1.25,
        ("tent", 2): 40.0,
    }
    succeeded(tribe_run("--realtime", "2", *options, "--methods", "source,bn"))
    added = json.loads(path.read_text())
    assert added.items() >= measured.items()
    assert len(added) == 3
    path.write_text("{")
    assert_refused(tribe_run("--realtime", *options), "costs.json", "measure again")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("arguments", "content", "words"),
    [
        (["--realtime", "0"], None, ["speed", "above 0"]),
        (["--realtime", "-1"], None, ["speed", "above 0"]),
        (["--realtime", "nan"], None, ["speed", "finite"]),
        (["--realtime", "inf"], None, ["speed", "finite"]),
        ([], {"source": 1, "tent": 2}, ["--realtime"]),
        (["--realtime"], {"source": 1}, ["no cost of tent"]),
        (["--realtime"], {"source": 1, "tent": 2, "tribbe": 7}, ["tribbe", "'tribe'"]),
        (["--realtime"], {"source": 1, "tent": -2}, ["tent", "above 0"]),
        (["--realtime"], {"source": 1, "tent": "2"}, ["tent", "number"]),
        (["--realtime"], {"spec": {"batch": 64}}, ["realtime"]),
        (["--realtime"], [1, 2], ["object"]),
        (["--realtime"], "missing", ["no costs at"]),
    ],
)
def test_bad_clocks_are_refused_in_words(few_digits, tmp_path, arguments, content, words):
    path = tmp_path / "costs.json"
    if content is not None:
        arguments = [*arguments, "--costs", path]
    if content not in (None, "missing"):
        path.write_text(json.dumps(content))
    options = ("--methods", "source,tent", "--data", few_digits, "--out", tmp_path / "runs")
    assert_refused(tribe_run(*arguments, *options), *words)
    assert not finished(tmp_path / "runs")
