"""The contract of norm rules. A check is named for the property it asserts; its docstring names the bug."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tribe.core.state import Stats
from tribe.norms import Norm
from tribe.testing import shared


def _moments(norm: Norm, rows: int = 3, batch: int = 7, channels: int = 5) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(rows, batch, channels, generator=generator, dtype=torch.float64)
    var = torch.rand(rows, batch, channels, generator=generator, dtype=torch.float64) + 0.1
    stats_mean = torch.randn(rows, norm.classes, channels, generator=generator, dtype=torch.float64)
    stats_var = torch.rand(rows, norm.classes, channels, generator=generator, dtype=torch.float64) + 0.5
    labels = torch.randint(norm.classes, (rows, batch), generator=generator)
    valid = torch.rand(rows, batch, generator=generator) > 0.2
    return mean, var, stats_mean, stats_var, labels, valid


def _apply(norm: Norm, mean: Tensor, var: Tensor, m: Tensor, v: Tensor, labels: Tensor, valid: Tensor) -> list[Tensor]:
    out_mean, out_var, kept = norm(mean, var, 9, Stats(m, v), labels, valid, 1e-5)
    return [out_mean, out_var, *kept]


def _close(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=0, atol=1e-10) for x, y in zip(a, b, strict=True))


def order_in_the_batch_does_not_matter(norm: Norm) -> None:
    """Catches a rule that favours the first sample of a class."""
    mean, var, m, v, labels, valid = _moments(norm)
    order = torch.arange(mean.shape[1]).flip(0)  # backwards: the first of each class becomes the last
    plain = _apply(norm, mean, var, m, v, labels, valid)
    mixed = _apply(norm, mean[:, order], var[:, order], m, v, labels[:, order], valid[:, order])
    plain[:2] = [t[:, order] if t.shape[1] == len(order) else t for t in plain[:2]]
    assert _close(plain, mixed), "the order of the batch changes the statistics"


def rows_are_independent(norm: Norm) -> None:
    """Catches statistics pooled over rows, that is, over streams or branches."""
    args = _moments(norm)
    together = _apply(norm, *args)
    for i in range(len(args[0])):
        alone = _apply(norm, *(t[i : i + 1] for t in args))
        assert _close([t[i : i + 1] for t in together], alone), f"row {i} differs when it is alone"


def invalid_samples_weigh_nothing(norm: Norm) -> None:
    """Catches padding that enters a statistic."""
    mean, var, m, v, labels, valid = _moments(norm, rows=1)
    real = valid[0]
    without = _apply(norm, mean[:, real], var[:, real], m, v, labels[:, real], valid[:, real])
    with_them = _apply(norm, mean, var, m, v, labels, valid)
    with_them[:2] = [t[:, real] if t.shape[1] == len(real) else t for t in with_them[:2]]
    assert _close(with_them, without), "an invalid sample changed a statistic"


def nothing_valid_keeps_the_statistics(norm: Norm) -> None:
    """Catches a division by an empty batch."""
    mean, var, m, v, labels, valid = _moments(norm)
    out = _apply(norm, mean, var, m, v, labels, torch.zeros_like(valid))
    assert all(bool(t.isfinite().all()) for t in out), "an empty batch makes statistics that are not finite"
    assert _close(out[2:], [m, v]), "an empty batch moved the statistics"


def changes_no_argument(norm: Norm) -> None:
    """Catches a rule that writes into the statistics it is given."""
    args = _moments(norm)
    copies = [t.clone() for t in args]
    _apply(norm, *args)
    assert all(torch.equal(a, b) for a, b in zip(args, copies, strict=True)), "the rule changed its arguments"


def gradients_are_right(norm: Norm) -> None:
    """Catches a rule that detaches the batch's share of the statistics, or keeps statistics with a graph.

    A rule that does so on purpose says why in ``stops_gradient``; an unneeded reason fails.
    """
    if not norm.observes:
        return
    mean, var, m, v, labels, valid = _moments(norm, rows=2, batch=4, channels=2)
    mean.requires_grad_()
    var.requires_grad_()

    def outputs(mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        return norm(mean, var, 9, Stats(m, v), labels, valid, 1e-5)[:2]

    assert any(t.requires_grad for t in outputs(mean, var)), "no gradient flows through the batch's share"
    exact = torch.autograd.gradcheck(outputs, (mean, var), raise_exception=False)
    if (reason := getattr(norm, "stops_gradient", None)) is None:
        assert exact, "the gradient differs from finite differences"
    else:
        assert not exact, f"stops_gradient is {reason!r}, but the gradient is that of finite differences"
    kept = norm(mean, var, 9, Stats(m, v), labels, valid, 1e-5)[2]
    assert not any(t.requires_grad for t in kept), "the statistics to keep have a graph"


NORM_CHECKS = shared.checks_of(globals())
