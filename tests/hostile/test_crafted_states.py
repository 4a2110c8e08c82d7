"""State files that anybody may have made: each is refused in words, or its stream goes on, and no other one suffers."""

import dataclasses
import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from http_calls import infer, refused, web
from small_server import serving, small_fleet

import tribe
from tribe.core.bounds import bounded
from tribe.core.state import digest, leaves, rebuild
from tribe.filters import names as filter_names
from tribe.io import states
from tribe.io.states import StateFileError
from tribe.methods import create
from tribe.methods import names as method_names
from tribe.serve.runtime import read_reports
from tribe.serve.worker import Worker
from tribe.testing import CLASSES, informed, ready, small, small_network
from watching import calibration_of, pictures

NUMBERS = (-1, 2**31, 2**62, -(2**63))


def watched_fleet(method="tribe", guard=True, time="time"):
    """A fleet whose streams "victim" and "hostile" have learned from a batch."""
    net = small_network()
    built = small(ready(method)) if isinstance(method, str) else method
    health = calibration_of(net, f"{built.name}+guard" + (f"+{time}" if time else "")) if guard else False
    fleet = tribe.fleet(net, built, guard=guard, health=health, time=time)
    fleet({name: pictures(1, 5, seed)[0] for seed, name in enumerate(("victim", "hostile"))})
    return fleet


def crafted(fleet, name, change):
    """The bytes of a valid state file whose digest is right, with one tensor changed."""
    saved = states.decode(fleet.to_bytes("hostile"))
    return states.encode(saved._replace(tensors=saved.tensors | {name: change(saved.tensors[name])}))


def filled(number):
    """A function that writes a number into the first and the last place of a tensor, in its type."""

    def change(tensor):
        changed = tensor.clone()
        bounds = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
        changed.view(-1)[[0, -1]] = max(bounds.min, min(bounds.max, number))
        return changed

    return change


def refusal(fleet, blob):
    """Why a file is refused; None if it is not."""
    try:
        fleet.from_bytes("hostile", blob)
    except StateFileError as error:
        return str(error)


def goes_on(fleet, blob):
    """Whether a file is accepted; then its stream and another one, in one batch, are stepped and reported."""
    before = states.decode(fleet.to_bytes("victim"))
    if (words := refusal(fleet, blob)) is not None:
        assert "holds" in words
        assert "expected" in words
        return False
    x = {name: pictures(1, 5, seed)[0] for seed, name in enumerate(("victim", "hostile"), 7)}
    fleet(x)
    assert read_reports(fleet, ["hostile", "victim"]).keys() == {"hostile", "victim"}
    fleet.to_bytes("hostile")
    after = fleet.to_bytes("victim")
    alone = fleet.from_bytes("victim", states.encode(before))
    alone({"victim": x["victim"]})
    expected, found = states.decode(alone.to_bytes("victim")).tensors, states.decode(after).tensors
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
    return True


def integral(fleet, prefix):
    """The names of integral tensors of a state, and of floats that are read as labels."""
    found = states.decode(fleet.to_bytes("hostile")).tensors
    whole = [n for n, t in found.items() if not t.is_floating_point() and t.dtype != torch.bool and t.numel()]
    labels = [n for n in found if n.endswith("rings.predicted")]
    return [name for name in whole + labels if name.startswith(prefix)]


def check(fleet, name):
    """Try all numbers in one tensor: numbers that are read as a count or an index are bounded."""
    accepted = [goes_on(fleet, crafted(fleet, name, filled(number))) for number in NUMBERS]
    if not name.endswith(("key.seed", "memory.shape")):  # they are only compared, and mixed into random numbers
        assert accepted[2:] == [False, False], name
        assert not accepted[0] or name.endswith("collapse.burst"), name


@pytest.mark.parametrize("method", method_names())
def test_a_number_of_a_method_is_refused_or_its_stream_goes_on(method):
    fleet = watched_fleet(method)
    for name in integral(fleet, "method."):
        check(fleet, name)


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("filter", filter_names())
def test_a_number_of_a_guard_or_a_filter_is_refused_or_its_stream_goes_on(guard, filter):
    fleet = watched_fleet(guard=guard, time=filter)
    for name in [*integral(fleet, "guard."), *integral(fleet, "filter.")]:
        if guard or name.startswith("filter."):
            check(fleet, name)


def test_a_label_of_one_stream_is_no_index_into_others():
    """Found in a server: the next batch of all streams failed, after its step."""
    fleet = watched_fleet()
    blob = crafted(fleet, "guard.watch.estimate.rings.predicted", filled(-1))
    with pytest.raises(StateFileError, match=r"rings\.predicted"):
        fleet.check_bytes("hostile", blob)
    bool_of_two = crafted(fleet, "guard.watch.alarms.on", lambda t: (t.byte() + 2).view(torch.bool))
    with pytest.raises(StateFileError, match=r"alarms\.on"):
        fleet.check_bytes("hostile", bool_of_two)


@pytest.mark.parametrize("name", ["method.adam.second.weight", "guard.watch.alarms.martingale.scale", "filter.belief"])
def test_a_variance_or_a_share_is_not_negative(name):
    fleet = watched_fleet("tent")
    with pytest.raises(StateFileError, match="holds"):
        fleet.check_bytes("hostile", crafted(fleet, name, filled(-0.5)))


@pytest.mark.parametrize("method", method_names())
def test_every_integral_tensor_of_a_state_has_bounds(method):
    fleet = watched_fleet(method)
    for name, tensor, bounds in bounded(fleet.state("hostile")):
        assert bounds is not None or tensor.is_floating_point(), name


# -- in a server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def watching():
    """A server with a guard and a calibration, and its fleet."""
    fleet = small_fleet(guard=tribe.Guard(skip=False), health=calibration_of(small_network(), "tribe+guard"))
    with serving(Worker(fleet)) as server:
        yield server, fleet


def post(server, stream, seed=0):
    return infer(server, pictures(1, 2, seed)[0].numpy(), sequence_id=stream)


def test_a_state_with_a_wrong_number_is_refused_by_name(watching):
    server, fleet = watching
    post(server, "hostile")
    blob = crafted(fleet, "guard.watch.estimate.rings.predicted", filled(-1))
    words = refused(web.put(f"{server.url}/v1/streams/hostile/state", content=blob), 409, "rings.predicted", "-1")
    assert "0 to 3" in words


def test_a_step_is_no_error_whatever_comes_after_it(watching, caplog):
    """All streams of a batch were answered with 500 after their step: each learned again from the next try."""
    server, fleet = watching
    for name in ("hostile", "victim"):
        assert post(server, name).status_code == 200
    state = fleet.state("hostile")
    fleet.replace_state("hostile", replaced(state, "guard.watch.estimate.rings.predicted", filled(-1)))
    both = "hostile", "victim"
    digests = [digest(fleet.method.step(fleet.net, fleet.state(name), pictures(1, 2, 1))[1]) for name in both]
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda name: post(server, name, 1), both))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [fleet.digest(name) for name in both] == digests
    assert answers[1].json()["parameters"]["tribe_clock"] == 2
    for seed in range(2, 5):
        assert post(server, "hostile", seed).status_code == 200
    assert web.post(f"{server.url}/v1/streams/hostile/freeze").status_code == 200
    assert len([r for r in caplog.records if "its report failed" in r.getMessage()]) == 1, "it is logged once"


def replaced(state, name, change):
    """A state with one tensor changed."""
    tensors = leaves(state)
    return rebuild(state, tensors | {name: change(tensors[name])})


# -- what a file names ------------------------------------------------------------------------------------------------

SECRET = "c0ffee-of-the-server"
SERVED = {
    "tribe": {},
    "eata": {},
    "selftrain": {"rule": "robust"},
    "tribe+watch": {},
}
touched: list[str] | None = None  # files that this process opens and modules that it imports, while a test asks


def note_touched(event, arguments):
    if touched is not None and event in ("open", "import", "os.listdir", "exec"):
        touched.append(str(arguments[0]))


@pytest.fixture(scope="module")
def audited():
    """Python tells what it opens from now on; it cannot be asked to cease."""
    sys.addaudithook(note_touched)


@pytest.fixture
def watched_files(audited, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "touched", [])
    return touched


def served_with(method):
    fleet = tribe.fleet(small_network(), informed(create(method, classes=CLASSES, **SERVED[method])))
    fleet({"hostile": pictures(1, 5)[0]})
    return fleet


@pytest.mark.parametrize("method", SERVED)
def test_a_file_that_a_state_names_is_not_touched(method, tmp_path, watched_files):
    """The answer showed eight bytes of any file of the server."""
    secret, code = tmp_path / "secret", tmp_path / "mine.py"
    secret.write_text(SECRET)
    code.write_text("raise AssertionError('it was imported')")
    fleet = served_with(method)
    saved = states.decode(fleet.to_bytes("hostile"))
    names = [str(secret), f"{code}:Mine", f"{secret}:Mine", f"balanced({secret})", "balanced(" + "-" * 100_000 + "1)"]
    values = [*names, *({"knowledge": name, "digest": name} for name in names), *([name] for name in names)]
    values += [{"augment": {"brightness": str(secret)}}, {"augment": [str(secret)] * 9}, {"callable": str(secret)}]
    deep = functools.reduce(lambda value, _: [value], range(300), str(secret))
    with serving(Worker(fleet)) as server:
        for field in [*saved.fields, "calibration", "knowledge", "unknown"]:
            for value in [*values, deep]:
                blob = states.encode(saved._replace(fields=saved.fields | {field: value}))
                watched_files.clear()
                answer = web.put(f"{server.url}/v1/streams/hostile/state", content=blob)
                words = refused(answer, 409, field)
                assert SECRET[:8] not in words
                assert len(words) < 500
                assert not [name for name in watched_files if str(tmp_path) in name], (field, value)


def test_no_file_that_a_state_names_is_opened_by_load(tmp_path, watched_files):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    for method, field in (("eata", "knowledge"), ("tribe+watch", "calibration")):
        saved = states.decode(served_with(method).to_bytes("hostile"))
        for value in (str(secret), {"knowledge": str(secret), "digest": ""}):
            states.write(tmp_path / "state", saved._replace(fields=saved.fields | {field: value}))
            watched_files.clear()
            with pytest.raises(StateFileError, match=field):
                tribe.load(tmp_path / "state", small_network())
            assert str(secret) not in watched_files


@pytest.mark.parametrize("deep", ["balanced(" + "-" * 100_000 + "1)", "balanced(a=" + "[" * 150 + "]" * 150 + ")"])
def test_a_rule_that_is_nested_deeply_is_an_error_in_words(deep, tmp_path):
    saved = states.decode(served_with("selftrain").to_bytes("hostile"))
    states.write(tmp_path / "state", saved._replace(fields=saved.fields | {"rule": deep}))
    with pytest.raises(StateFileError, match="settings"):
        tribe.load(tmp_path / "state", small_network())


def test_a_state_that_is_read_tells_no_path_of_the_server(tmp_path):
    method = ready("eata")
    method.knowledge.save(tmp_path / "known.safetensors")
    fleet = tribe.fleet(small_network(), dataclasses.replace(method, knowledge=tmp_path / "known.safetensors"))
    fleet({"hostile": pictures(1, 5)[0]})
    assert str(tmp_path).encode() not in fleet.to_bytes("hostile")
