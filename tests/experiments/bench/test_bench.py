"""`tribe bench` measures the given setting, compares files, and restores all global settings."""

import copy
import json

import pytest
import torch
from torch import nn

import tribe
from commands import assert_refused, succeeded, tribe_command, write_method
from places import ROOT
from processes import ended
from tribe.core import clock, kernels
from tribe.core.state import count_bytes
from tribe.experiments.bench import contenders, measurement, results
from tribe.experiments.bench.contenders import Workload, count_operations

CPU = torch.device("cpu")
SHAPE = (3, 8, 8)
OWN = """
from torch import nn

print("printed by the model")
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
fixed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 4))
"""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()


def setting(**fields):
    return measurement.Setting(**{"model": "tiny", "shape": SHAPE, "classes": 4, "batch": 4, **fields})


def workload(batch=4, streams=1):
    net = network()
    return Workload(net, tribe.Backbone(net), torch.rand(streams, batch, *SHAPE), 4, False)


@pytest.fixture(scope="module")
def result():
    return measurement.measure(network(), setting(streams=2), ["source", "rotta", "tribe"], repeats=2)


@pytest.fixture
def own(tmp_path, monkeypatch, registries):
    """A folder with a custom network, and the options that name it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    return "bench", "--model", "mine.py:net", "--shape", "3,8,8", "--batch", "4", "--repeats", "2"


@pytest.fixture
def spied(monkeypatch):
    """What the contender spy was built with, and the settings of that moment."""
    monkeypatch.setattr(contenders, "_builders", dict(contenders._builders))
    seen = []

    @contenders.contender("spy")
    def spy(given):
        seen.append((given, torch.get_num_threads(), kernels.mode()))
        return contenders.create("plain", given)

    return seen


def test_every_contender_has_its_numbers(result):
    assert [row.name for row in result.rows] == ["plain", "channels-last", "source", "rotta", "tribe"]
    plain = result.rows[0]
    assert plain.times["plain"] == 1
    assert plain.state_bytes == 0
    for row in result.rows:
        assert row.ms_per_image > 0
        assert row.times["plain"] == pytest.approx(row.ms_per_image / plain.ms_per_image)
        assert row.share == pytest.approx(row.tflops / result.matmul_tflops)
        assert row.capture_disabled_reason is None  # there are no CUDA graphs on a CPU
    assert result.matmul_tflops > 0
    assert result.machine["torch"] == torch.__version__


def test_state_is_that_of_all_streams(result):
    state = tribe.adapt(network(), "tribe", streams=2).state
    assert result.rows[-1].state_bytes == count_bytes(state)


def test_operations_are_those_of_the_layers():
    forward = 2 * 4 * (8 * 3 * 9 * 36 + 288 * 4)  # multiply and add, of 4 images: convolution and classifier
    assert count_operations(contenders.create("plain", workload())) == forward
    assert count_operations(contenders.create("source", workload())) == forward
    # TENT goes back through the classifier to the norm layer; the convolution's input needs no gradient.
    assert count_operations(contenders.create("tent", workload())) == forward + 2 * 4 * 288 * 4


def test_a_method_that_learns_now_and_then_is_counted_and_timed_over_whole_periods():
    every_fourth = contenders.create("rotta", workload(batch=16))
    assert every_fourth.period == 4
    assert contenders.create("rotta", workload(batch=64)).period == 1
    assert contenders.create("rotta", workload(batch=48)).period == 4  # 4 batches of 48 are 3 updates
    assert contenders.create("tribe", workload(batch=16)).period == 1
    quarter = count_operations(contenders.create("rotta", workload(batch=64))) / 4
    assert count_operations(every_fourth) == pytest.approx(quarter, rel=0.01)

    calls = []
    clock.time_in_turns({"a": lambda: calls.append(1)}, 3, CPU, block=0.0, periods={"a": 4})
    assert len(calls) == 4 * (1 + 3)  # one call to choose the number of calls, then three timings


def test_contenders_take_turns_and_none_always_follows_the_same_one():
    order = []
    calls = {name: (lambda: None) for name in "abc"}
    times = clock.time_in_turns(calls, 3, CPU, block=0.0, on_timing=order.append)
    assert order == list("abcbcacab")
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_peak_memory_includes_memory_that_was_freed():
    with clock.peak_memory(CPU) as peak:
        torch.ones(2**26)  # 256 MB, freed at once
    if peak.bytes is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert 0.95 * 2**28 < peak.bytes < 1.2 * 2**28  # the system counts pages roughly
    with clock.peak_memory(CPU) as peak:
        pass
    assert peak.bytes < 2**26


@pytest.mark.parametrize("method", [*tribe.methods.names(), "selftrain/fixmatch"])
def test_any_method_can_take_part(method):
    """With the source knowledge it needs, if any, and a memory with room for the images."""
    call = contenders.create(method, workload(batch=6, streams=2)).call
    assert call().shape == (2, 6, 4)
    assert call().shape == (2, 6, 4)


def test_bf16_is_bf16_for_all(spied):
    measurement.measure(network(), setting(precision="bf16"), ["tribe", "spy"], repeats=1)
    given = spied[-1][0]
    assert {given.images.dtype, given.net[0].weight.dtype, given.backbone.dtype} == {torch.bfloat16}


def test_everything_is_put_back(spied):
    net, threads, mode = network(), torch.get_num_threads(), kernels.mode()
    before, drawn = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    measurement.measure(net, setting(threads=1, kernels=False), ["spy"], repeats=1)
    assert {tuple(settings) for _, *settings in spied} == {(1, False)}
    assert (torch.get_num_threads(), kernels.mode()) == (threads, mode)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_the_networks_that_are_timed_are_always_the_same_and_keep_their_activations_in_bounds():
    drawn = torch.get_rng_state()
    first, again = contenders.build("wrn10_1"), contenders.build("wrn10_1")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in first.state_dict().items())
    assert not first.training
    assert first(torch.rand(8, 3, 32, 32)).abs().max() < 100


def test_progress_reaches_its_end():
    calls = []
    measurement.measure(network(), setting(), ["tent"], repeats=2, progress=lambda *call: calls.append(call))
    done, total, _ = zip(*calls, strict=True)
    assert list(done) == list(range(1, total[0] + 1))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch": 0}, "batch of Setting"),
        ({"streams": 0}, "streams of Setting"),
        ({"threads": 0}, "threads of Setting"),
        ({"shape": ()}, "shape is the shape of one image"),
        ({"precision": "fp8"}, "precision is float32, tf32 or bf16; got 'fp8'"),
        ({"precision": "tf32"}, "tf32 is a format of NVIDIA GPUs"),
    ],
)
def test_an_impossible_setting_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        setting(**fields)


def test_a_result_reads_back(result, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(results.to_data(result)))
    assert results.read(tmp_path / "a.json") == result


def test_compare_names_what_changed(result):
    slower = [dict(vars(row)) for row in result.rows]
    slower[-1]["ms_per_image"] *= 2
    machine = {**result.machine, "torch": "9.9"}
    new = measurement.BenchResult(
        result.setting, machine, result.repeats, 1.0, tuple(measurement.BenchRow(**row) for row in slower[1:])
    )
    ratios = results.compare(result, new)
    assert ratios["tribe"] == 2
    assert ratios["source"] == 1
    assert ratios["plain"] is None  # missing in the new one
    assert results.machine_differences(result, new) == [f"torch {torch.__version__} -> 9.9"]
    text = results.show_changes(result, new)
    assert "-> 9.9" in text
    assert next(line for line in text.splitlines() if line.startswith("tribe")).split()[5] == "2.00"


def test_other_settings_are_not_compared(result):
    other = measurement.Setting(**{**vars(result.setting), "batch": 5, "precision": "bf16"})
    with pytest.raises(ValueError, match=r"batch 4 then, 5 now; precision float32 then, bf16 now"):
        results.check_comparable(result.setting, other)
    results.check_comparable(
        *(measurement.Setting(**{**vars(result.setting), "device": d}) for d in ("cuda", "cuda:1"))
    )  # one of several equal ones


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data.pop("rows"), "rows is missing; expected a list"),
        (lambda data: data["setting"].pop("batch"), r"setting\.batch is missing; expected an integer"),
        (lambda data: data["rows"][0].update(ms_per_image=0), r"rows\.0\.ms_per_image is 0; expected a positive"),
        (lambda data: data["setting"].update(batch=0), "batch of Setting"),
        (lambda data: data.update(repeats=None), "repeats is None; expected an integer"),
        (lambda data: data.update(schema=7), "has format 7"),
        (lambda data: data.update(kind="something"), "is not a result"),
    ],
)
def test_damaged_results_are_refused(result, tmp_path, spoil, words):
    data = json.loads(json.dumps(results.to_data(result)))
    spoil(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=words):
        results.read(tmp_path / "bad.json")


def test_the_command_prints_a_table_and_writes_json(own, tmp_path):
    result = succeeded(tribe_command(*own, "--methods", "tent,tribe", "--streams", "2", "--json", "out.json"))
    assert "2 streams x 4 images of 3x8x8" in result.stdout
    for name in ("plain", "channels-last", "tent", "tribe"):
        assert any(line.startswith(f"{name} ") for line in result.stdout.splitlines())
    saved = results.read(tmp_path / "out.json")
    assert saved.setting.classes == 4
    assert [row.name for row in saved.rows] == ["plain", "channels-last", "tent", "tribe"]


def test_only_json_is_on_stdout_whatever_custom_code_prints(own):
    chatty = write_method("Chatty", "print('words of a step')", start="print('words at import')")
    result = tribe_command(*own, "--methods", chatty, "--json", "-")
    report = json.loads(result.stdout)
    assert report["setting"]["model"] == "mine.py:net"
    assert "chatty" in [row["name"] for row in report["rows"]]
    for words in ("ms/image", "printed by the model", "words at import", "words of a step"):
        assert words in result.stderr


def test_the_command_compares(own, tmp_path):
    tribe_command(*own, "--methods", "tent", "--json", "old.json")
    result = succeeded(tribe_command(*own, "--methods", "tent,source", "--compare", "old.json", "--json", "old.json"))
    assert "now / then" in result.stdout
    data = json.loads((tmp_path / "old.json").read_text())
    assert data["compared"]["now_over_then"]["tent"] > 0
    assert data["compared"]["now_over_then"]["source"] is None
    results.read(tmp_path / "old.json")

    result = tribe_command(*own, "--threads", "1", "--compare", "old.json")
    assert_refused(result, "the settings differ", "threads None then, 1 now")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--methods", "trbe"), "unknown method 'trbe': did you mean 'tribe'"),
        (("--methods", ","), "no method to measure"),
        (("--repeats", "0"), "repeats is how often"),
        (("--shape", "3,a"), "--shape is the shape of one image"),
        (("--shape", "3,9,9"), "failed on images of shape (3, 9, 9)"),
        (("--classes", "7"), "expected logits of shape (1, 7)"),
        (("--model", "mine.py:fixed"), "nothing to adapt"),
        (("--model", "resnet21"), "unknown model 'resnet21'"),
        (("--compare", "nothing.json"), "no result at nothing.json"),
        (("--compare", "mine.py"), "is not JSON"),
        (("--json", "nowhere/out.json"), "no folder nowhere"),
        (("--json", "."), "is a folder"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--batch", "1000000000000"), "not enough memory"),
    ],
)
def test_bad_options_are_explained(own, options, words):
    assert_refused(tribe_command(*own, *options), words)


def test_a_custom_model_needs_a_shape(own):
    assert_refused(tribe_command("bench", "--model", "mine.py:net"), "--shape")


def test_the_released_structure_is_a_contender_of_the_benchmarks(tmp_path):
    out = tmp_path / "out.json"
    words = ("--model", "wrn10_1", "--batch", "2", "--repeats", "1", "--json", out)
    done = ended("-m", "benchmarks", *words, cwd=ROOT)
    assert done.code == 0, done.err
    rows = {row.name: row for row in results.read(out).rows}
    assert {"source", "tent", "rotta", "tribe", "released"} < rows.keys()
    assert rows["released"].state_bytes > 0


def test_the_released_structure_refuses_several_streams(capsys):
    from benchmarks.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["--model", "wrn10_1", "--batch", "2", "--repeats", "1", "--streams", "2", "--methods", "released"])
    assert ended.value.code == 2
    assert "runs one stream only" in " ".join(capsys.readouterr().err.split())
