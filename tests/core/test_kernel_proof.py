"""Kernels that give wrong numbers or cannot be built are noticed before they serve a stream, and turned off."""

import functools
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import tribe
from kernel_runs import DEVICE, runs
from tribe.core import augment, kernels, rules
from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.kernels import activations, colour, filtering, proof, random_numbers, statistics
from tribe.core.state import leaves
from tribe.filters import markov
from tribe.norms import balanced
from tribe.testing import CLASSES, images, small_network

NAN = "float('nan')"
# What notices the mutants of a module; its text, and what it becomes at the first place.
MUTANTS = {
    activations: (
        [rules._layer],
        [
            (
                "tl.store(mean + which.to(tl.int64) * C + c, centre",
                f"tl.store(mean + which.to(tl.int64) * C + c, {NAN}",
            ),
            ("tl.where(parts == 1, total / L, total)", "total"),
            ("(end - first + LONG - 1) // LONG", "(end - first) // LONG"),
            ("tl.maximum(square, 0.0) + count * off * off", "tl.maximum(square, 0.0)"),
            ("step * step * (seen * share)", "step * step * seen"),
            ("tl.store(mean + n * C + c, centre, c < C)", "pass"),
            ("b += s * tl.load(offset", "b += tl.load(offset"),
            ("t += tl.load(residual", "t -= tl.load(residual"),
            (
                "tl.store(y + at, t.to(y.dtype.element_ty), inside)",
                "tl.store(y + at, t, inside & (i < L - 1)[:, None])",
            ),
            ("t = tl.where(t < 0, 0.0, t)", "pass"),
            ("(t > 0).to(tl.int8)", "(t > 1).to(tl.int8)"),
            ("for start in range(begin, end, LONG)", "for start in range(begin, end - LONG, LONG)"),
            ("tl.sum(product, 0) + o * total", "tl.sum(product, 0)"),
            ("mine = (n // sharing) * C + c", "mine = c"),
            ("own, mine = n * C + c, (n // sharing) * C + c", "own, mine = n * C + c, c"),
            ("- o)", "+ o)"),
            ("(2.0 / L)", "(2.0 / (L - 1))"),
            ("dx + at, slope.to(dx.dtype.element_ty)", f"dx + at, slope * {NAN}"),
            ("pixel = C * WIDTH", "pixel = C"),
        ],
    ),
    statistics: (
        [rules._layer, balanced._updated],
        [
            ("tl.store(spread + r * C + c, square / many", "tl.store(spread + r * C + c, square / B"),
            ("tl.store(count + r, many)", "pass"),
            ("2 * by_var * off", "by_var * off"),
            ("weight + r * weight_row + c", "weight + c"),
            ("tl.store(dvar + at, -0.5 * w", "tl.store(dvar + at, 0.5 * w"),
            ("by_bias += g", f"by_bias += g * {NAN}"),
            ("tl.maximum(who, 0)[:, None] * past_class", "tl.maximum(who - 1, 0)[:, None] * past_class"),
            ("(who >= 0)[:, None]", "(who > 0)[:, None]"),
            ("growth *= 1 - shrink", "pass"),
            ("- K * move * move", ""),
            ("tl.store(kept_var + theirs, sigma2", f"tl.store(kept_var + theirs, {NAN} * sigma2"),
            ("tl.minimum(begin + each, K), MANY", "tl.minimum(begin + each, K - MANY), MANY"),
            ("tl.load(past_mean + source, others, 0) + shared_step[None, :]", "tl.load(past_mean + source, others, 0)"),
            ("by_delta + 2 * by_fresh", "by_delta + by_fresh"),
        ],
    ),
    filtering: (
        [markov._filtered],
        [
            ("belief = tl.where(real, joint / total, belief)", "belief = joint / total"),
            ("forget * (0.5 - share_earned)", "0.0"),
            ("tl.store(evidence1 + row, evidence)", f"tl.store(evidence1 + row, evidence * {NAN})"),
            ("tl.store(marginal1 + row * classes + k, marginal, mask=inside)", "pass"),
            ("r * tl.sum(ahead, 0) / classes", "r * tl.sum(ahead, 0)"),
            ("tl.where(tl.load(counted + image) != 0, back / tl.sum(back, 0), later)", "back / tl.sum(back, 0)"),
        ],
    ),
    random_numbers: (
        [random_numbers._numbers],
        [
            ("(w0 >> 8)", "(w0 >> 9)"),
            ("tick >> 32", "tick >> 31"),
            ("tl.store(out + at + 3, v3, at + 3 < n)", "pass"),
            ("r1 * tl.cos(a1)", "r0 * tl.cos(a1)"),
        ],
    ),
    colour: (
        [augment._jittered],
        [
            ("_unit(green * f), _unit(blue * f)", "_unit(green * f), _unit(blue)"),
            ("target = total / pixels", "target = total / TILE"),
            ("tl.store(sums + which, total)", "pass"),
            ("_hue(low, depth, h - 0.33333334)", "_hue(low, depth, h - 0.3)"),
        ],
    ),
}
EVERY = [(module, noticed_by, *change) for module, (noticed_by, changes) in MUTANTS.items() for change in changes]


@pytest.fixture
def first_use(monkeypatch):
    """No kernel was compared yet, and none is off; as before once the test is done."""
    monkeypatch.setattr(proof, "_compared", {})
    monkeypatch.setattr(proof, "refused", {})
    monkeypatch.setattr(proof, "off", None)


@pytest.fixture
def mutate(tmp_path, monkeypatch):
    """Return a function that replaces the kernels of a module by those of a changed copy of its file."""

    def replace(module, text, by):
        healthy = Path(module.__file__).read_text()
        assert text in healthy
        path = tmp_path / "mutated.py"
        path.write_text(healthy.replace(text, by, 1))
        spec = importlib.util.spec_from_file_location("mutated", path)
        mutated = importlib.util.module_from_spec(spec)
        monkeypatch.setattr(proof, "comparisons", list(proof.comparisons))  # a copy may register its own
        spec.loader.exec_module(mutated)
        for name, kernel in vars(mutated).items():
            if isinstance(kernel, type(activations._apply)):
                monkeypatch.setattr(module, name, kernel)

    return replace


@runs
@pytest.mark.parametrize(
    ("module", "noticed_by", "text", "by"), EVERY, ids=[f"{text} -> {by}" for *_, text, by in EVERY]
)
def test_a_wrong_kernel_is_noticed(module, noticed_by, text, by, mutate):
    """Memory is filled with NaN: it must not hold the numbers that a healthy kernel wrote there in another test."""
    mutate(module, text, by)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert proof.first_difference(torch.device(DEVICE), noticed_by) is not None
    finally:
        torch.use_deterministic_algorithms(False)


@runs
def test_healthy_kernels_are_compared_once_and_stay_on(first_use, monkeypatch):
    comparisons, seen = proof.comparisons, []
    monkeypatch.setattr(proof, "comparisons", [lambda device: seen.append(device) or {}, *comparisons])
    with warnings.catch_warnings(), kernels.using("auto"), torch.inference_mode():
        warnings.simplefilter("error")
        assert kernels.can_launch(torch.zeros(1, device=DEVICE))
        assert kernels.can_launch(torch.zeros(1, device=DEVICE))
    assert len(seen) == 2  # by kernels, and by tensor operations
    assert "compared" in kernels.state()
    proof.comparisons.append(lambda device: {"new": [torch.tensor(float(proof.forced.get()))]})
    with pytest.warns(RuntimeWarning, match="new"):  # a module that was imported later
        assert not kernels.can_launch(torch.zeros(1, device=DEVICE))


def steps(method, net):
    """Three batches; nothing of the result depends on kernels beyond rounding."""
    state, outputs = method.init(net, 2), []
    for seed in range(3):
        step = functools.partial(method.step, net, state, images(2, 6, seed).to(DEVICE))
        logits, state = kernels.or_without(step)
        outputs.append(logits)
    return torch.stack(outputs), state


def same(a, b):
    assert torch.equal(a[0], b[0])
    assert all(torch.equal(s, t) for s, t in zip(leaves(a[1]).values(), leaves(b[1]).values(), strict=True))


@runs
def test_a_kernel_that_returns_nan_is_turned_off_with_one_warning(first_use, mutate):
    """The stream gets what tensor operations compute; its first step already."""
    mutate(activations, "tl.store(y + at, t.to", f"tl.store(y + at, {NAN} * t.to")
    method, net = tribe.methods.create("tribe", classes=CLASSES), Backbone(small_network()).to(DEVICE)
    with kernels.using(False):
        wanted = steps(method, net)
    with kernels.using("auto"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = steps(method, net)
        assert kernels.mode() is False
    (message,) = [str(w.message) for w in caught if "kernels" in str(w.message)]
    assert "normalised activations" in message
    assert DEVICE in message
    assert message.split(":")[0] in kernels.state()
    same(found, wanted)


class Failing:
    """Stands in for a kernel: Triton refuses its arguments."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel[(1,)]()


@runs
def test_a_step_in_which_triton_fails_is_repeated_without_kernels(first_use, monkeypatch):
    method, net = tribe.methods.create("tribe", classes=CLASSES), Backbone(small_network()).to(DEVICE)
    with kernels.using(False):
        wanted = steps(method, net)
    with kernels.using("auto"):
        assert kernels.can_launch(torch.zeros(1, device=DEVICE))  # the comparison went well
        monkeypatch.setattr(statistics, "_update", Failing(statistics._update))
        with pytest.warns(RuntimeWarning, match="off in this process") as caught:
            found = steps(method, net)
    assert len(caught) == 1
    assert "TypeError" in kernels.state()
    same(found, wanted)


@runs
def test_steps_are_repeated_without_kernels(first_use, monkeypatch):
    method, net = tribe.methods.create("tribe", classes=CLASSES), Backbone(small_network()).to(DEVICE)
    state = method.init(net, 1)
    with kernels.using("auto"):
        assert kernels.can_launch(torch.zeros(1, device=DEVICE))  # the comparison went well
        monkeypatch.setattr(statistics, "_update", Failing(statistics._update))
        with pytest.warns(RuntimeWarning, match="off in this process"):
            found = Steps(method, net)(state, images(1, 6))
    with kernels.using(False):
        same(found, method.step(net, state, images(1, 6)))


@runs
def test_other_errors_in_a_step_are_raised(first_use):
    def wrong():
        raise ValueError("a label")

    with pytest.raises(ValueError, match="label"):
        kernels.or_without(wrong)
    with pytest.raises(TypeError, match="argument"):  # a network's own kernel
        kernels.or_without(lambda: activations._apply[(1,)]())
    assert proof.off is None


@pytest.mark.parametrize("failing", ["a compiler", "an old GPU"])
def test_kernels_that_cannot_be_built_warn_once(failing, first_use, monkeypatch):
    """The errors of torch and Triton are simulated: no machine of the tests has them."""

    def broken(device):
        raise OSError("no C compiler was found")

    capability = (7, 5) if failing == "an old GPU" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    monkeypatch.setattr(proof, "comparisons", [broken])
    reason = r"\(7, 5\)" if failing == "an old GPU" else "no C compiler"
    with pytest.warns(RuntimeWarning, match=f"cannot be used on cuda:0.*{reason}"):
        assert not proof.works(torch.device("cuda", 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not proof.works(torch.device("cuda", 0))


def state_of_kernels(folder, triton):
    """What another process says of its kernels, if this is its Triton; a stream runs all the same."""
    (folder / "triton").mkdir()
    (folder / "triton/__init__.py").write_text(triton)
    (folder / "triton/language.py").write_text("constexpr = int")
    code = """if True:
        import torch, tribe
        from tribe.core import kernels
        from tribe.testing import small_network
        assert tribe.adapt(small_network())(torch.rand(4, 3, 8, 8)).shape[0] == 4
        print(kernels.state())
    """
    source = str(Path(tribe.__file__).parents[1])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(folder), source))}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("triton", ["raise AttributeError('of an old torch')", "version = '1.0'"])
def test_a_triton_that_cannot_be_imported_is_left_alone(triton, tmp_path):
    """An old one, or one for another Python: the package works without it, and says why."""
    state = state_of_kernels(tmp_path, triton)
    assert state.startswith("off")
    assert "AttributeError" in state


def test_the_state_says_why_kernels_are_off():
    if kernels.missing is not None:
        assert kernels.missing in kernels.state()
    elif not proof.refused and proof.off is None:
        with kernels.using(False):
            assert "using" in kernels.state()
