"""Norm rules: the recorded numbers, the slow loops, the gradients, and the properties of each rule."""

import dataclasses
import itertools
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference
from places import DATA, SHARED
from tribe import norms
from tribe.core.backbone import Backbone
from tribe.core.moments import observe
from tribe.core.state import Affine, Stats
from tribe.norms import Norm
from tribe.norms.balanced import BIG, Balanced
from zoo import Bare, gap

FULL, SMALL = SHARED / "goldens/balanced_bn_open.npz", DATA / "balanced_bn.npz"
GOLDENS = {path: sorted({key.split("/")[0] for key in np.load(path).files}) for path in (SMALL, FULL) if path.exists()}
EPS = 1e-3

SINGLE_FIELDS: list[dict[str, Any]] = [{"pooled_ddof": 0}, {"pooled_ddof": 1}, {"rate_cap": False}, {"rate_cap": True}]
SINGLE_FIELDS += [{"gamma_over": "present"}, {"gamma_over": "all"}]
CLASS_AGNOSTIC = [norms.create("frozen"), norms.create("batch")]
CLASS_AGNOSTIC += [norms.create("robust", alpha=alpha) for alpha in (0.05, 0.3, 1.0)]
CLASS_AGNOSTIC += [
    norms.create("instance", k=k, observing=observing) for k in (0.5, 4.0) for observing in (False, True)
]
CONVENTIONS = ["released", "paper"]


class Case(NamedTuple):
    x: Tensor  # (R, B, C, ...)
    affine: Affine
    stats: Stats
    labels: Tensor
    valid: Tensor

    def samples(self, chosen: Tensor) -> "Case":
        return self._replace(x=self.x[:, chosen], labels=self.labels[:, chosen], valid=self.valid[:, chosen])


def draw(norm: Norm, seed: int = 0, rows: int = 1, batch: int = 9, shape: tuple[int, ...] = (3, 4)) -> Case:
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, dtype=torch.float64)

    columns = (rows, norm.classes, shape[0])
    return Case(
        1.5 * normal(rows, batch, *shape) + normal(rows, batch, shape[0], *[1] * len(shape[1:])) + 1,
        Affine(normal(rows, shape[0]), normal(rows, shape[0])),
        Stats(normal(*columns), normal(*columns).abs() + 0.5),
        torch.randint(norm.classes, (rows, batch), generator=g),
        torch.rand(rows, batch, generator=g) > 0.25,
    )


@cache
def bare(channels: int, dtype: torch.dtype = torch.float64) -> Backbone:
    return Backbone(Bare(nn.BatchNorm2d(channels, EPS)).to(dtype))


def normalised(norm: Norm, case: Case, labelled: bool = True) -> tuple[Tensor, Stats]:
    """Through the real path: a slot in a Backbone. (R, B, C, ...) and the statistics kept."""
    out = bare(case.x.shape[2], case.x.dtype)(
        case.x, case.affine, case.stats, norm, case.labels if labelled else None, case.valid
    )
    return out.logits.view(case.x.shape), out.stats


def moments_used(norm: Norm, case: Case) -> tuple[Tensor, Tensor, Stats]:
    return norm(*observe(case.x), case.x.shape[3:].numel(), case.stats, case.labels, case.valid, EPS)


def gaps(a: tuple[Any, ...], b: tuple[Any, ...]) -> float:
    return max(gaps(u, v) if isinstance(u, tuple) else gap(u, v) for u, v in zip(a, b, strict=True))


def balanced_rules(classes: int) -> list[Norm]:
    """Both conventions, and each with every single field set; uncapped eta stays small, or variances go below 0."""
    rules: list[Norm] = []
    for convention, field, gamma in itertools.product(CONVENTIONS, [{}, *SINGLE_FIELDS], (0.0, 0.3, 1.0)):
        rule = Balanced(classes, 0.3, gamma, convention, **field)  # type: ignore[arg-type]
        rules.append(rule if rule.rate_cap else dataclasses.replace(rule, eta=0.05))
    return list(dict.fromkeys(rules))


def every_rule(classes: int = 5) -> list[Norm]:
    return CLASS_AGNOSTIC + [Balanced(classes, 0.1, 0.3, c) for c in CONVENTIONS]  # type: ignore[arg-type]


each_rule = pytest.mark.parametrize("norm", every_rule(), ids=str)


# -- the recorded numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("path", "case"), [(path, case) for path, cases in GOLDENS.items() for case in cases])
def test_released_convention_reproduces_the_recorded_calls(path: Path, case: str, device: str) -> None:
    """Output, statistics and gradients over successive calls, through a slot; on a GPU by the kernels."""
    with np.load(path) as file:
        mine = (key for key in file.files if key.startswith(f"{case}/"))
        golden = {key.removeprefix(f"{case}/"): torch.from_numpy(file[key]).to(device) for key in mine}
    classes, eta, gamma, eps = golden["cfg"].tolist()
    norm = Balanced(int(classes), eta, gamma)
    net = Backbone(Bare(nn.BatchNorm2d(len(golden["weight"]), eps))).to(device)
    stats = Stats(*(golden[k].expand(1, norm.classes, -1) for k in ("init_mean", "init_var")))
    calls = sum(key.endswith("/x") for key in golden)
    assert calls >= 2  # the second call starts from the first one's statistics
    for call in range(calls):
        now = {k.removeprefix(f"{call}/"): v for k, v in golden.items() if k.startswith(f"{call}/")}
        leaves = [t.clone().requires_grad_() for t in (now["x"], golden["weight"], golden["bias"])]
        x, weight, bias = (t[None] for t in leaves)
        logits, _, stats = net(x, Affine(weight, bias), stats, norm, now["label"][None])
        out = logits.view_as(now["x"])
        grads = torch.autograd.grad(out, leaves, now["cot"])
        pooled = norm.pool(stats)
        seen = {"out": out, "class_mean": stats.mean[0], "class_var": stats.var[0]}
        seen |= {"mean": pooled.mean[0, 0], "var": pooled.var[0, 0]}
        seen |= dict(zip(("grad_x", "grad_w", "grad_b"), grads, strict=True))
        for name, value in seen.items():
            recorded = now[name]  # of `out` and `grad_x` the small file keeps the first samples only
            assert gap(value[: len(recorded)], recorded) <= 3e-6 * recorded.abs().max(), f"{name} of call {call}"


# -- the slow loops -------------------------------------------------------------------------------------------------


def slow(norm: Any, case: Case) -> tuple[Tensor, Tensor, Stats, Tensor]:
    """Mean and var used (R, 1|B, C), statistics kept, and the output, row by row, by the loops in reference.py."""
    fields = {f.name: getattr(norm, f.name) for f in dataclasses.fields(norm)}
    fields = {name: value for name, value in fields.items() if name not in ("classes", "convention")}
    rows = []
    for r in range(len(case.x)):
        x = case.x[r].flatten(2).numpy()
        used = reference.RULES[norm.name](
            x, case.labels[r].tolist(), case.valid[r].tolist(), *(t[r].numpy() for t in case.stats), **fields
        )
        y = reference.normalise(x, used.mean, used.var, *(t[r].numpy() for t in case.affine), EPS)
        mean, var = (t if t.ndim == 2 else t[None] for t in used[:2])
        rows.append((mean, var, used.class_mean, used.class_var, y.reshape(case.x.shape[1:])))
    mean, var, class_mean, class_var, y = (torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True))
    return mean, var, Stats(class_mean, class_var), y


def agrees_with_the_slow_loop(norm: Norm, case: Case) -> None:
    mean, var, stats, y = slow(norm, case)
    assert gaps(moments_used(norm, case), (mean, var, stats)) < 1e-10
    assert gaps(normalised(norm, case), (y, stats)) < 1e-10


def test_every_slow_loop_is_of_a_registered_norm() -> None:
    """A rule without a loop in reference.py is checked by the contract alone; name one with a loop in `every_rule`."""
    assert set(norms.names()) >= set(reference.RULES) == {norm.name for norm in every_rule()}  # type: ignore[attr-defined]
    assert {"balanced", "batch", "frozen", "instance", "robust"} <= set(reference.RULES)


@pytest.mark.parametrize("rules", [CLASS_AGNOSTIC, *map(balanced_rules, (1, 2, 5, 12))])
def test_every_rule_equals_the_slow_loop_balanced_in_both_conventions_and_each_single_field(rules: list[Norm]) -> None:
    """Random batches (with 12 classes some are absent), one class only, one sample only, and nothing valid."""
    for norm in rules:
        for seed in range(3):
            case = draw(norm, seed, rows=3)
            agrees_with_the_slow_loop(norm, case)
        agrees_with_the_slow_loop(norm, case._replace(labels=torch.full_like(case.labels, norm.classes - 1)))
        agrees_with_the_slow_loop(norm, case._replace(valid=torch.zeros_like(case.valid)))
        agrees_with_the_slow_loop(norm, case.samples(torch.tensor([1])))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("field", ["pooled_ddof", "rate_cap", "gamma_over"])
def test_every_field_of_the_convention_changes_the_numbers(convention: str, field: str) -> None:
    """Catches a comparison in which a field plays no part, and a field that is stored and not used."""
    other = getattr(Balanced(convention="paper" if convention == "released" else "released"), field)
    norm = Balanced(5, 0.3, 0.3, convention)  # type: ignore[arg-type]
    case = draw(norm, batch=40)
    assert gap(normalised(norm, case)[0], normalised(dataclasses.replace(norm, **{field: other}), case)[0]) > 1e-3


# -- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 2, 3), (2, 2, 1, 2)], ids=["NC", "NCL", "NCHW", "NCDHW"])
@each_rule
def test_gradients_of_a_whole_slot_are_right(norm: Norm, shape: tuple[int, ...]) -> None:
    """Finite differences through moments, rule, scale and shift; catches any error in the joint backward."""
    case = draw(norm, rows=2, batch=4, shape=shape)

    def outputs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return normalised(norm, case._replace(x=x, affine=Affine(weight, bias)))[0]

    leaves = tuple(t.clone().requires_grad_() for t in (case.x, *case.affine))
    assert torch.autograd.gradcheck(outputs, leaves)


def test_batch_rule_equals_torch_batch_norm_with_its_gradients() -> None:
    case = draw(norm := norms.create("batch"), shape=(3, 2, 4))
    case = case._replace(valid=torch.ones_like(case.valid))
    leaves = tuple(t.clone().requires_grad_() for t in (case.x, *case.affine))
    ours = normalised(norm, case._replace(x=leaves[0], affine=Affine(*leaves[1:])))[0]
    theirs = F.batch_norm(leaves[0][0], None, None, leaves[1][0], leaves[2][0], training=True, eps=EPS)[None]
    assert gap(ours, theirs) < 1e-10
    assert gaps(*(torch.autograd.grad(y.cos().sum(), leaves) for y in (ours, theirs))) < 1e-10


# -- properties of the rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4, 5, 12])
@pytest.mark.parametrize("norm", [Balanced(5, gamma=0.3), Balanced(5), Balanced(5, gamma=0.3, convention="paper")])
def test_several_momenta_at_once_equal_each_alone(norm: Balanced, batch: int) -> None:
    """Catches an image that counts twice, or classes that are summed around another centre than their own."""
    streams, speeds = 2, (0.02, 0.3)
    case = draw(norm, rows=streams, batch=batch)
    case = case._replace(valid=case.valid | (torch.arange(streams) == 0).unsqueeze(1), stats=draw(norm, 1, 4).stats)
    moments, origin = Stats(*observe(case.x)), torch.full((1, 1, 3), 0.7, dtype=torch.float64)
    room = Stats(*(torch.empty_like(t) for t in case.stats))
    sums = norm.sum_classes(moments, case.labels, case.valid, origin)
    pooled = norm.follow(case.stats, torch.tensor(speeds, dtype=torch.float64).view(-1, 1, 1), sums, room)
    for row in range(streams * len(speeds)):
        alone, stream = dataclasses.replace(norm, eta=speeds[row % 2]), slice(row // 2, row // 2 + 1)
        stats = Stats(*(t[row : row + 1] for t in case.stats))
        one = (t[stream] for t in (case.labels, case.valid))
        mean, var, kept = alone(*(t[stream] for t in moments), 12, stats, *one, EPS)
        together = [Stats(*(t[row : row + 1] for t in part)) for part in (pooled, room)]
        assert gaps((Stats(mean, var), kept), tuple(together)) < 1e-12


def classes_of_very_different_size() -> tuple[Tensor, Tensor]:
    """x (1, B, C, L) and labels (1, B): classes of 1, 2, 6 and 30 samples, each with its own mean and spread."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat_interleave(torch.tensor([1, 2, 6, 30]))
    x = torch.randn(len(labels), 3, 5, generator=g, dtype=torch.float64)
    x = x * (1 + labels)[:, None, None] + 4 * torch.randn(4, 3, 1, generator=g, dtype=torch.float64)[labels]
    return x[None], labels[None]


def resampled_evenly(x: Tensor, labels: Tensor) -> Tensor:
    """Each class repeated to the same count, 30 samples: (C, 4 * 30 * L)."""
    parts = [x[labels == k].repeat(30 // int((labels == k).sum()), 1, 1) for k in range(4)]
    return torch.cat(parts).movedim(1, 0).flatten(1)


def test_pooled_statistics_are_those_of_a_class_balanced_resample() -> None:
    """Eq. 2: however rare a class, it counts as much as any other."""
    x, labels = classes_of_very_different_size()
    of_class = [x[labels == k].movedim(1, 0).flatten(1) for k in range(4)]  # (C, n_k * L)
    stats = Stats(
        *(torch.stack(t)[None] for t in zip(*((c.mean(1), c.var(1, correction=0)) for c in of_class), strict=True))
    )
    even = resampled_evenly(x, labels)
    pooled = Balanced(4, convention="paper").pool(stats)
    assert gaps(pooled, Stats(even.mean(1)[None, None], even.var(1, correction=0)[None, None])) < 1e-10


def test_pooling_is_the_same_where_deviations_leave_the_cache() -> None:
    """Catches another divisor, or another axis, where class statistics are large."""
    g, norm = torch.Generator().manual_seed(0), Balanced(700)
    stats = Stats(torch.randn(2, 700, 3001, generator=g) + 3, torch.rand(2, 700, 3001, generator=g))
    assert stats.mean.numel() > BIG
    wide = norm.pool(stats)
    for columns in (slice(5), slice(2000, 3001)):
        few = norm.pool(stats.layer(columns, 0))
        assert gap(wide.mean[..., columns], few.mean) < 1e-5
        assert gap(wide.var[..., columns], few.var) < 1e-5


def test_with_gamma_1_the_mean_is_that_of_robust_bn_and_the_variance_is_not() -> None:
    """Without the limits of the released code; the share of a batch is then eta B / K."""
    g = torch.Generator().manual_seed(0)
    balanced, robust = Balanced(4, 0.1, 1.0, "paper"), norms.create("robust", alpha=0.1 * 6 / 4)
    stats, valid = (
        Stats(torch.zeros(1, 1, 3).double(), torch.ones(1, 1, 3).double()),
        torch.ones(1, 6, dtype=torch.bool),
    )
    own = Stats(*(t.expand(1, 4, 3) for t in stats))
    for _ in range(3):
        mean, var = torch.rand(2, 1, 6, 3, generator=g, dtype=torch.float64)
        labels = torch.randint(4, (1, 6), generator=g)
        mean_b, var_b, own = balanced(mean, var, 9, own, labels, valid, EPS)
        mean_r, var_r, stats = robust(mean, var, 9, stats, None, valid, EPS)
        torch.testing.assert_close(mean_b, mean_r, rtol=0, atol=1e-12)
        assert (var_b - var_r).abs().max() > 1e-3


@each_rule
def test_invalid_samples_weigh_nothing_in_outputs_statistics_and_gradients(norm: Norm) -> None:
    """Catches padding in a statistic: leaving the invalid samples out gives the same numbers."""
    case = draw(norm)
    keep = case.valid[0]
    assert 0 < keep.sum() < len(keep)

    def outcome(case: Case) -> tuple[Tensor, Stats, tuple[Tensor, ...]]:
        leaves = tuple(t.clone().requires_grad_() for t in (case.x, *case.affine))
        y, stats = normalised(norm, case._replace(x=leaves[0], affine=Affine(*leaves[1:])))
        return y, stats, torch.autograd.grad(y[case.valid].sin().sum(), leaves)

    y, stats, (dx, *affine) = outcome(case)
    assert gaps((y[:, keep], stats, (dx[:, keep], *affine)), outcome(case.samples(keep))) < 1e-12
    assert gap(dx[:, ~keep], torch.zeros_like(dx[:, ~keep])) == 0


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_without_labels_balanced_uses_its_pooled_statistics_and_leaves_them(convention: str) -> None:
    norm = Balanced(5, 0.1, 0.3, convention)  # type: ignore[arg-type]
    case = draw(norm)
    y, stats = normalised(norm, case, labelled=False)
    frozen = normalised(norms.create("frozen"), case._replace(stats=norm.pool(case.stats)))[0]
    assert gaps((y, stats), (frozen, case.stats)) < 1e-12


@pytest.mark.parametrize("least", [0.1, 0.0], ids=["textured", "constant"])
@pytest.mark.parametrize("eta", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_variances_stay_variances_under_the_released_rate_cap(eta: float, gamma: float, least: float) -> None:
    """Catches a rate at which one large class subtracts more than its whole past.

    Where every image is one colour a class's variance may truly be 0: then rounding is all that may be below it.
    """
    norm = Balanced(3, eta, gamma)
    g = torch.Generator().manual_seed(0)
    stats = Stats(torch.zeros(1, 3, 4), torch.ones(1, 3, 4))
    for _ in range(150):
        scale = 10 ** (2 * torch.rand(1, generator=g) - 1)
        mean = scale * torch.randn(1, 20, 4, generator=g)
        var = scale.square() * (least + least * torch.rand(1, 20, 4, generator=g))
        labels = torch.randint(int(torch.randint(1, 4, (), generator=g)), (1, 20), generator=g)
        _, pooled, stats = norm(mean, var, 9, stats, labels, torch.ones(1, 20, dtype=torch.bool), EPS)
        assert stats.var.min() > (0 if least else -1e-6 * scale.square())
        assert pooled.min() >= 0
    assert stats.var.isfinite().all()


def test_without_a_cap_the_variance_used_is_never_negative() -> None:
    """The paper's rate can make a variance negative; the variance that normalises must not be."""
    norm = Balanced(3, 1.0, convention="paper")
    case = draw(norm)
    case = case._replace(x=case.x.sign(), labels=torch.zeros_like(case.labels))
    y, stats = normalised(norm, case)
    assert stats.var.min() < 0
    assert moments_used(norm, case)[1].min() == 0
    assert y.isfinite().all()
    predicted, kept = normalised(norm, case._replace(stats=stats), labelled=False)
    assert norm.pool(kept).var.min() == 0
    assert predicted.isfinite().all()


# -- precision ------------------------------------------------------------------------------------------------------


def in_float32(case: Case, dtype: torch.dtype) -> Case:
    """Statistics and affine parameters in float32, x in ``dtype``."""
    affine, stats = Affine(*(t.float() for t in case.affine)), Stats(*(t.float() for t in case.stats))
    return case._replace(x=case.x.to(dtype), affine=affine, stats=stats)


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
@each_rule
def test_half_precision_input_keeps_full_precision_statistics(norm: Norm, dtype: torch.dtype, close: float) -> None:
    """Catches sums in half precision: with 1,024 pixels and an offset those would be far off."""
    case = in_float32(draw(norm, shape=(3, 32, 32)), dtype)
    (y, stats), (wide_y, wide_stats) = normalised(norm, case), normalised(norm, case._replace(x=case.x.float()))
    assert y.dtype == dtype
    assert stats.mean.dtype == stats.var.dtype == torch.float32
    assert gaps(stats, wide_stats) < 1e-6
    assert gap(y.float(), wide_y) < close * wide_y.abs().max()


@each_rule
def test_half_precision_gradients_are_close_to_full_precision(norm: Norm) -> None:
    case = in_float32(draw(norm, shape=(3, 8, 8)), torch.bfloat16)

    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        leaves = tuple(t.clone().requires_grad_() for t in (x, *case.affine))
        y, _ = normalised(norm, case._replace(x=leaves[0], affine=Affine(*leaves[1:])))
        return torch.autograd.grad(y.float().square().mean(), leaves)

    for narrow, wide in zip(gradients(case.x), gradients(case.x.float()), strict=True):
        assert gap(narrow.float(), wide) < 3e-2 * wide.abs().max()


@each_rule
def test_autocast_does_not_reach_the_statistics(norm: Norm) -> None:
    """Catches a matrix product over classes that autocast turns into bfloat16."""
    convolution = nn.Conv2d(3, 4, 3, bias=False)  # a fused bias would not be rounded to bfloat16
    model = nn.Sequential(convolution, Bare(nn.BatchNorm2d(4, EPS)))
    net = Backbone(model)
    case = in_float32(draw(norm, shape=(3, 8, 8)), torch.float32)
    columns = in_float32(draw(norm, shape=(4,)), torch.float32)
    rest = (columns.affine, columns.stats, norm, case.labels, case.valid)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        features = model[0](case.x[0])
        out = net(case.x, *rest)
    assert features.dtype == out.logits.dtype == torch.bfloat16
    with torch.no_grad():
        plain = bare(4, torch.float32)(features.float()[None], *rest)
    assert gaps(out.stats, plain.stats) < 1e-6
    assert gap(out.logits.float(), plain.logits) < 1e-2 * plain.logits.abs().max()


# -- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("balanced", {"eta": 0.0}, "eta of balanced is above 0 and at most 1; got 0.0"),
        ("balanced", {"eta": 1.5}, "eta of balanced is above 0"),
        ("balanced", {"eta": float("nan")}, "eta of balanced"),
        ("balanced", {"gamma": -0.1}, "gamma of balanced is between 0 and 1"),
        ("balanced", {"classes": 0}, "classes of balanced is at least 1"),
        ("balanced", {"convention": "papr"}, "convention is one of released, paper; got 'papr'"),
        ("balanced", {"pooled_ddof": 2}, "pooled_ddof of balanced is 0 or 1"),
        ("balanced", {"gamma_over": "some"}, "gamma_over of balanced is 'present' or 'all'"),
        ("robust", {"alpha": 2.0}, "alpha of robust"),
        ("training", {"momentum": 1.5}, "momentum of training"),
        ("mixed", {"share": 1.5}, "share of mixed"),
        ("instance", {"k": -1.0}, "k of instance"),
        ("instance", {"momentum": 1.5}, "momentum of instance"),
        ("renorm", {"alpha": -0.1}, "alpha of renorm"),
        ("domains", {"eta": 0.0}, "eta of domains"),
        ("ballanced", {}, "unknown norm 'ballanced': did you mean 'balanced'"),
        ("robust", {"alfa": 0.1}, "norm 'robust' has no field 'alfa': did you mean 'alpha'"),
    ],
)
def test_bad_configurations_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        norms.create(name, **fields)
