"""The backbone: the same network as the caller's, with the normalisation as an argument and nothing else changed."""

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import reference
import tribe
from places import ROOT
from tribe import norms
from tribe.engine.all_weights import WeightLayout
from tribe.engine.backbone import Backbone, Output
from tribe.engine.slots import Slot
from tribe.engine.state import Affine, Stats, leaves
from tribe.models.layers import BatchNormReLU
from tribe.norms import Norm
from tribe.norms.balanced import Balanced

FROZEN, BATCH = norms.create("frozen"), norms.create("batch")
BALANCED = Balanced(classes=4, eta=0.1, gamma=0.2)


# -- a zoo ----------------------------------------------------------------------------------------------------------


def small(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """Two convolutions, each with a norm layer and an in-place ReLU, as everyone writes them."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        norm(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, stride=2, bias=False),
        norm(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Nested(nn.Module):
    """Norm layers inside a ModuleList inside a ModuleDict inside a Sequential, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.ModuleDict({"norm": nn.BatchNorm2d(5), "conv": nn.Conv2d(5, 5, 3, padding=1)}) for _ in range(2)]
        self.stem = nn.Sequential(nn.Sequential(nn.Conv2d(3, 5, 3)), nn.Sequential(nn.BatchNorm2d(5)))
        self.parts = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.parts["blocks"]:
            x = x + block["conv"](block["norm"](x).relu())
        return self.head(x.mean((2, 3)))


class Shared(nn.Module):
    """One BatchNorm under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 5, 3)
        self.norm1 = self.norm2 = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm2(self.second(self.norm1(self.first(x)).relu())).relu().mean((2, 3)))


class Encoder(nn.Module):
    """A small vision transformer of torch's own layers, which have a fused fast path in evaluation mode."""

    def __init__(self, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=batch_first, norm_first=norm_first)
        self.batch_first = batch_first
        self.embed = nn.Linear(6, 8)
        self.encoder = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(8), enable_nested_tensor=batch_first and not norm_first
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)  # (N, T, 8)
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x[:, 0])


class BatchNormAct2d(nn.BatchNorm2d):
    """BatchNorm with a built-in activation, as timm writes it. Its drop layer here shows whether it is called."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Hardtanh(), nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        train = self.training or self.running_mean is None
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, train, 0.1, self.eps)
        return self.act(self.drop(x))


def activated() -> nn.Sequential:
    """The same two convolutions with layers that normalise and activate, as our own networks have them."""
    return nn.Sequential(*(m for m in small(BatchNormReLU) if not isinstance(m, nn.ReLU)))


class Doubled(nn.BatchNorm2d):
    """A BatchNorm with a forward that nobody can know."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def late(frames: Tensor) -> Tensor:
    """Pool (B, T, ...) over time; later frames weigh more, so that their order is seen."""
    return (frames * torch.arange(1, frames.shape[1] + 1, dtype=frames.dtype)[:, None]).mean(1)


class Video(nn.Module):
    """Folds time into the batch (N = B T) for its convolutions, as video networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.layernorm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.LayerNorm(5)
        self.head = nn.Linear(5, 4)

    def frames(self, x: Tensor) -> Tensor:
        return self.layernorm(self.norm(self.conv(x.flatten(0, 1))).relu().mean((2, 3)))  # (B T, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(late(self.frames(x).unflatten(0, x.shape[:2])))


class ByFrame(Video):
    """Classifies every frame and pools the logits."""

    def forward(self, x: Tensor) -> Tensor:
        return late(self.head(self.frames(x)).unflatten(0, x.shape[:2]))


class Wrapped(nn.Module):
    """Does something to what another network returns."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.change = small(), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.inner(x))


def mixed() -> nn.Module:
    """A LayerNorm without affine parameters, and one without a bias, beside a BatchNorm."""
    norms = (nn.BatchNorm1d(8), nn.LayerNorm(8, elementwise_affine=False), nn.Tanh(), nn.LayerNorm(8, bias=False))
    return nn.Sequential(nn.Linear(6, 8), *norms, nn.Linear(8, 4))


def no_affine_no_statistics(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, affine=False, track_running_stats=False)


IMAGE = (3, 8, 8)
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d (N, C)": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)), (6,)),
    "BatchNorm1d (N, C, L)": (
        lambda: nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), nn.Flatten(), nn.Linear(30, 4)),
        (3, 8),
    ),
    "BatchNorm2d": (small, IMAGE),
    "BatchNorm3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 5, 3), nn.BatchNorm3d(5), nn.ReLU(), nn.Flatten(), nn.Linear(40, 4)),
        (2, 4, 4, 4),
    ),
    "SyncBatchNorm": (partial(small, nn.SyncBatchNorm), IMAGE),
    "affine=False": (partial(small, partial(nn.BatchNorm2d, affine=False)), IMAGE),
    "track_running_stats=False": (partial(small, partial(nn.BatchNorm2d, track_running_stats=False)), IMAGE),
    "neither": (partial(small, no_affine_no_statistics), IMAGE),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), (6,)),
    "LayerNorm (C, H, W)": (
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.LayerNorm([2, 6, 6]), nn.Tanh(), nn.Flatten(), nn.Linear(72, 4)),
        IMAGE,
    ),
    "LayerNorms beside BatchNorm": (mixed, (6,)),
    "GroupNorm": (partial(small, partial(nn.GroupNorm, 2)), IMAGE),
    "nested": (Nested, IMAGE),
    "shared": (Shared, IMAGE),
    "TransformerEncoder": (Encoder, (5, 6)),
    "TransformerEncoder, norm first": (partial(Encoder, norm_first=True), (5, 6)),
    "TransformerEncoder, tokens first": (partial(Encoder, batch_first=False), (5, 6)),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), small()), IMAGE),
    "BatchNormAct2d": (partial(small, BatchNormAct2d), IMAGE),
    "BatchNormReLU": (activated, IMAGE),
    "video": (Video, (3, 3, 6, 6)),
    "video by frame": (ByFrame, (3, 3, 6, 6)),
    ".logits": (partial(Wrapped, lambda y: SimpleNamespace(logits=y, loss=None)), IMAGE),
}
each_model = pytest.mark.parametrize("name", ZOO)


def build(name: str, seed: int = 0) -> nn.Module:
    """A model of the zoo whose norm layers have lived: no weight is 1, no mean 0."""
    torch.manual_seed(seed)
    model = ZOO[name][0]()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm | nn.LayerNorm | nn.GroupNorm):
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5)
            if getattr(layer, "running_mean", None) is not None:
                nn.init.normal_(layer.running_mean, 0.0, 0.3)
                nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return model.eval()


def images(name: str, rows: int = 1, batch: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(rows, batch, *ZOO[name][1], generator=g, dtype=torch.float64).to(dtype)


def logits(result: Any) -> Tensor:
    return getattr(result, "logits", result)


class Arguments(NamedTuple):
    affine: Affine
    stats: Stats
    norm: Norm
    labels: Tensor
    valid: Tensor

    def row(self, r: int) -> "Arguments":
        row = slice(r, r + 1)
        affine, stats = Affine(*(t[row] for t in self.affine)), Stats(*(t[row] for t in self.stats))
        return Arguments(affine, stats, self.norm, self.labels[row], self.valid[row])


def different_rows(net: Backbone, norm: Norm, rows: int, batch: int = 6, seed: int = 0) -> Arguments:
    """Every row with its own affine parameters, statistics, labels and valid samples."""
    g = torch.Generator().manual_seed(seed)
    affine, stats = net.source(rows, norm.classes)

    def shaken(t: Tensor) -> Tensor:
        return t * (0.7 + 0.6 * torch.rand(t.shape, generator=g, dtype=t.dtype))

    labels = torch.randint(norm.classes, (rows, batch), generator=g)
    valid = torch.rand(rows, batch, generator=g) > 0.2
    return Arguments(Affine(*map(shaken, affine)), Stats(*map(shaken, stats)), norm, labels, valid)


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


# -- the same network -----------------------------------------------------------------------------------------------


@each_model
def test_frozen_rule_equals_the_model_in_eval_mode(name: str) -> None:
    model, x = build(name), images(name)
    net = Backbone(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert gap(net(x, *net.source(), FROZEN).logits[0], logits(model(x[0]))) <= 1e-5


@each_model
def test_batch_rule_equals_the_model_with_its_batch_norms_in_train_mode(name: str) -> None:
    model, x = build(name), images(name)
    net = Backbone(model)
    ours, before = net(x, *net.source(), BATCH), net.source()[1]
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
    assert gap(ours.logits[0], logits(model(x[0]))) <= 1e-5
    assert gap(ours.stats.mean, before.mean) == gap(ours.stats.var, before.var) == 0


@pytest.mark.parametrize("norm", [FROZEN, BATCH, norms.create("robust", alpha=0.3), BALANCED], ids=str)
@each_model
def test_rows_together_equal_each_alone(name: str, norm: Norm) -> None:
    """Catches rows that fold into the batch and come out as someone else's."""
    net = Backbone(build(name).double())
    for batch in (5, 1):
        x, arguments = images(name, 3, batch, dtype=torch.float64), different_rows(net, norm, 3, batch)
        together = net(x, *arguments)
        assert gap(together.logits[0], together.logits[1]) > 1e-4
        for r in range(3):
            alone = net(x[r : r + 1], *arguments.row(r))
            assert gap(together.logits[r], alone.logits[0]) < 1e-10
            assert max(gap(a[r], b[0]) for a, b in zip(together.stats, alone.stats, strict=True)) < 1e-10
            if alone.features is not None:
                assert together.features is not None
                assert gap(together.features[r], alone.features[0]) < 1e-10


@each_model
def test_gradients_reach_the_affine_parameters_of_every_layer(name: str) -> None:
    """And are zero where a layer has none: nothing there can drift."""
    net = Backbone(build(name).double())
    affine, stats = net.source(2)
    affine = Affine(*(t.requires_grad_() for t in affine))
    x = images(name, 2, dtype=torch.float64)
    if not net.has_affine:
        with pytest.raises(ValueError, match="no normalisation layer of the network has affine parameters to learn"):
            net(x, affine, stats, BATCH)
        return
    y = net(x, affine, stats, BATCH).logits
    grads = torch.autograd.grad(y.log_softmax(-1).square().sum(), affine)
    for slot in net.slots:
        columns = slice(start := sum(s.channels for s in net.slots[: slot.index]), start + slot.channels)
        for grad, parameter in zip(grads, (slot.layer.weight, slot.layer.bias), strict=True):
            part = grad[:, columns]
            assert (part == 0).all() if parameter is None else (part.abs().amax(1) > 1e-9).all(), slot.name


@each_model
def test_the_callers_model_is_never_changed(name: str) -> None:
    """Values, gradients, requires_grad, training flags and hooks, before and after a forward and a backward."""
    model = build(name).train()
    model.register_forward_hook(lambda *_: None)
    first = next(model.parameters())
    first.requires_grad_(False)

    def everything() -> list[Any]:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
        kept = {k: (v.clone(), v._version, v.stride()) for k, v in model.state_dict().items()}
        flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
        return [kept, hooks, flags, [(type(m), m.training) for m in model.modules()]]

    before = everything()
    net = Backbone(model)
    arguments = different_rows(net, BALANCED, 2)
    y = net(images(name, 2).requires_grad_(), *arguments).logits
    y.square().sum().backward()
    net.plain(*net.source()).double()
    after = everything()
    for (a, *rest), (b, *others) in zip(before[0].values(), after[0].values(), strict=True):
        assert torch.equal(a, b)
        assert rest == others
    assert before[1:] == after[1:]


@each_model
def test_plain_round_trip_is_an_ordinary_model(name: str) -> None:
    """With the source's rows it is the source; with others it does what the backbone did with them."""
    model, x = build(name), images(name)
    net = Backbone(model)
    plain = net.plain(*net.source())
    assert gap(logits(plain(x[0])), logits(model(x[0]))) <= 1e-5
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]
    assert list(plain.state_dict()) == list(model.state_dict())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in plain.modules())
    affine, stats, *_ = different_rows(net, FROZEN, 1)
    assert gap(logits(net.plain(affine, stats)(x[0])), net(x, affine, stats, FROZEN).logits[0]) <= 1e-5
    assert gap(logits(net.plain(affine, None)(x[0])), net(x, affine, stats, BATCH).logits[0]) <= 1e-5
    assert gap(logits(plain(x[0])), logits(model(x[0]))) <= 1e-5  # the first one stayed as it was


class Exp(nn.Module):
    """A parametrization: a scale that stays positive."""

    def forward(self, w: Tensor) -> Tensor:
        return w.exp()


def tied(model: nn.Module) -> None:
    model[1].weight = model[4].weight
    model[1].running_var = model[4].running_var


def parametrized(model: nn.Module) -> None:
    parametrize.register_parametrization(model[1], "weight", Exp())
    parametrize.register_parametrization(model[4], "bias", Exp())


def remade(model: nn.Module) -> None:
    """A hook makes the weight from something else at each call, as torch.nn.utils.prune does."""
    layer = model[1]
    half = 0.5 * layer.weight.detach()
    del layer.weight
    layer.weight = 2 * half
    layer.register_forward_pre_hook(lambda layer, args: setattr(layer, "weight", 2 * half.to(layer.bias)))


@pytest.mark.parametrize("change", [tied, parametrized, remade])
def test_exported_layers_have_parameters_of_their_own(change: Callable[[nn.Module], None]) -> None:
    """Catches a copy into what another layer holds too, or what is made anew at the next call."""
    torch.manual_seed(0)
    model, x = small(lambda _: nn.BatchNorm2d(6)), images("BatchNorm2d")
    model[3], model[8] = nn.Conv2d(6, 6, 3), nn.Linear(6, 4)
    change(model.eval())
    net = Backbone(model)
    assert net.left_alone == {}
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5
    affine, stats, *_ = different_rows(net, FROZEN, 1)
    for _ in range(2):
        for kept, norm in ((stats, FROZEN), (None, BATCH)):
            assert gap(net.plain(affine, kept)(x[0]), net(x, affine, stats, norm).logits[0]) <= 1e-5
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5  # nothing was taken from the caller's


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@each_model
def test_precision_of_the_model_is_kept(name: str, dtype: torch.dtype) -> None:
    """Whatever the precision of the images; statistics and affine parameters are float32 at least."""
    model, x = build(name).to(dtype), images(name)
    net = Backbone(model)
    affine, stats = net.source(1, 4)
    y, _, stats = net(x, affine, stats, BALANCED, torch.zeros(1, 6, dtype=torch.int64))
    assert y.dtype == net.dtype == dtype
    exact = dtype == torch.float64
    if any(slot.layer.weight is not None for slot in net.slots):
        assert affine.weight.dtype == affine.bias.dtype == (torch.float64 if exact else torch.float32)
    if stats.mean.numel():
        assert stats.mean.dtype == stats.var.dtype == (torch.float64 if exact else torch.float32)
    theirs = logits(model(x[0].to(dtype)))
    assert gap(net(x, *net.source(), FROZEN).logits[0], theirs) <= (1e-12 if exact else 5e-2)


@pytest.mark.parametrize("norm", [FROZEN, BATCH, BALANCED], ids=str)
def test_memory_format_of_the_images_changes_nothing(norm: Norm) -> None:
    net, x = Backbone(build("BatchNorm2d")), images("BatchNorm2d", 2)
    arguments = different_rows(net, norm, 2)
    other = x.movedim(2, -1).contiguous().movedim(-1, 2)  # channels last
    assert other.stride() != x.stride()
    a, b = net(x, *arguments), net(other, *arguments)
    assert max(gap(a.logits, b.logits), gap(a.stats.mean, b.stats.mean), gap(a.stats.var, b.stats.var)) < 1e-6


def test_dropout_stays_off_after_train() -> None:
    net, x = Backbone(build("dropout").train()), images("dropout")
    assert net.train() is net
    assert not any(m.training for m in net.modules())
    assert torch.equal(net(x, *net.source(), FROZEN).logits, net(x, *net.source(), FROZEN).logits)


# -- particular layers ----------------------------------------------------------------------------------------------


def test_a_norm_under_two_names_is_one_slot() -> None:
    net = Backbone(build("shared"))
    assert len(net.slots) == 1
    assert net.channels == 5


class Twice(nn.Module):
    """Calls its one BatchNorm twice in a pass, and returns what the second call made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.precision = nn.BatchNorm1d(3, 1e-3), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(2 * self.norm(x) + 1).flatten(1)


@pytest.mark.parametrize("norm", [norms.create("robust", alpha=0.3), BALANCED], ids=str)
def test_a_layer_called_twice_goes_on_from_its_first_call(norm: Any) -> None:
    """Catches a second call that starts from the old statistics, or overwrites the first: two slow loops in turn."""
    net = Backbone(Twice().double())
    x = images("BatchNorm1d (N, C, L)", dtype=torch.float64)
    affine, stats, _, labels, valid = arguments = different_rows(net, norm, 1)
    out = net(x, *arguments)

    names = ("alpha",) if norm.name == "robust" else ("eta", "gamma", "pooled_ddof", "rate_cap", "gamma_over")
    rule = partial(reference.RULES[norm.name], **{name: getattr(norm, name) for name in names})
    weight, bias = (t[0].numpy() for t in affine)
    y, kept = x[0].numpy(), tuple(t[0].numpy() for t in stats)
    for call in range(2):
        used = rule(y if call == 0 else 2 * y + 1, labels[0].tolist(), valid[0].tolist(), *kept)
        y = reference.normalise(y if call == 0 else 2 * y + 1, used.mean, used.var, weight, bias, 1e-3)
        kept = used[2:]
    assert gap(out.logits[0], torch.from_numpy(y).flatten(1)) < 1e-10
    for ours, theirs in zip(out.stats, kept, strict=True):
        np.testing.assert_allclose(ours[0].numpy(), theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("classifier", [None, "head"])  # named, no other layer has a hook, which would stop torch too
@pytest.mark.parametrize("name", [name for name in ZOO if name.startswith("Transformer")])
def test_fused_transformer_layers_do_not_bypass_the_slots(name: str, classifier: str | None, grad: bool) -> None:
    """Catches torch's fast path, which reads the parameters of the norm layers and never calls them."""
    model, x = build(name), images(name)
    net = Backbone(model, classifier)
    assert len(net.slots) == 5
    affine, stats, *_ = different_rows(net, FROZEN, 1)
    norm_layers = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    with torch.no_grad():
        for layer, weight, bias in zip(norm_layers, *(t[0].split(8) for t in affine), strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    with torch.set_grad_enabled(grad):
        changed = net(x, affine, stats, FROZEN).logits[0]
        assert gap(changed, net(x, *net.source(), FROZEN).logits[0]) > 1e-2
        assert gap(changed, model(x[0])) <= 1e-5


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_tokens_before_samples_are_told_apart(batch: int) -> None:
    """Catches rows cut out of the token axis, (T, N, C), above all where T is a multiple of N."""
    net = Backbone(build("TransformerEncoder, tokens first").double())
    x, arguments = torch.rand(2, batch, 4, 6, dtype=torch.float64), different_rows(net, FROZEN, 2, batch)
    together = net(x, *arguments).logits
    for r in range(2):
        assert gap(together[r], net(x[r : r + 1], *arguments.row(r)).logits[0]) < 1e-10


def test_as_many_tokens_as_samples_are_refused_where_either_may_come_first() -> None:
    net = Backbone(build("TransformerEncoder, tokens first"))
    with pytest.raises(
        ValueError, match=r"as many tokens as samples, 4,.* Use another batch size, or batch_first=True"
    ):
        net(torch.rand(2, 2, 4, 6), *different_rows(net, FROZEN, 2, 2))
    alone = net(torch.rand(1, 4, 4, 6), *different_rows(net, FROZEN, 1, 4))  # one row: nothing to tell apart
    assert alone.logits.shape == (1, 4, 4)


def test_an_unknown_forward_is_left_alone_and_listed() -> None:
    torch.manual_seed(0)
    model = small()
    model[4] = Doubled(8)
    net, x = Backbone(model.eval()), images("BatchNorm2d")
    assert net.left_alone == {"4": "Doubled has a custom forward"}
    assert [slot.name for slot in net.slots] == ["1"]
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


class Gated(nn.BatchNorm2d):
    """Has an activation, and another use for it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.act(y)


class ActivatedFirst(Gated):
    """As long as it is fresh, this is what activating afterwards gives."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, self.act(x))


class Noisy(Gated):
    """Draws from the generator that everybody shares."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(F.dropout(nn.BatchNorm2d.forward(self, x)))


class Counting(BatchNormAct2d):
    """Keeps count of its calls."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [Gated, ActivatedFirst, Noisy])
def test_a_layer_with_an_activation_that_does_something_else_is_left_alone(kind: type[nn.Module]) -> None:
    """Catches a slot that guesses what a forward does from the attributes of the layer."""
    torch.manual_seed(0)
    model = small()
    model[4] = kind(8)
    before = torch.get_rng_state()
    net, x = Backbone(model.eval()), images("BatchNorm2d")
    assert torch.equal(torch.get_rng_state(), before)
    assert net.left_alone == {"4": f"{kind.__name__} has a custom forward"}
    if kind is not Noisy:
        assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


def test_a_layer_that_is_tried_is_not_changed() -> None:
    net = Backbone(small(Counting))
    assert len(net.slots) == 2
    assert [int(slot.layer.calls) for slot in net.slots] == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_is_tried_in_every_precision(dtype: torch.dtype) -> None:
    assert Backbone(small(BatchNormAct2d).to(dtype)).left_alone == {}
    assert set(Backbone(nn.Sequential(small(), Gated(4)).to(dtype)).left_alone) == {"1"}


def test_a_forward_put_on_a_layer_itself_is_left_alone() -> None:
    model = build("BatchNorm2d")
    layer = model[4]
    layer.forward = lambda x: 3 * F.batch_norm(x, layer.running_mean, layer.running_var)
    net, x = Backbone(model), images("BatchNorm2d")
    assert net.left_alone == {"4": "BatchNorm2d has a custom forward"}
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


@pytest.mark.parametrize("name", ["BatchNorm2d", "GroupNorm", "SyncBatchNorm"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_layer_whose_hooks_change_what_it_gives_is_left_alone(name: str, where: str) -> None:
    model, x = build(name), images(name)
    if where == "before":
        model[1].register_forward_pre_hook(lambda layer, args: (args[0] ** 2,))
    else:
        model[1].register_forward_hook(lambda layer, args, y: 3 * y)
    net = Backbone(model)
    assert net.left_alone == {"1": "its hooks change its output"}
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


def test_a_layer_with_a_hook_on_its_gradient_is_left_alone() -> None:
    model = build("BatchNorm2d")
    model[1].register_full_backward_hook(lambda layer, into, out: (into[0] * 0,))
    assert Backbone(model).left_alone == {"1": "it has hooks on its gradient"}


@pytest.mark.parametrize("name", ["BatchNorm2d", "BatchNorm1d (N, C)", "BatchNorm3d", "LayerNorm (C, H, W)"])
def test_a_layer_whose_hooks_only_look_is_adapted(name: str) -> None:
    model, x, seen = build(name), images(name), []
    model[1].register_forward_hook(lambda layer, args, y: seen.append(y))
    net = Backbone(model)
    assert net.left_alone == {}
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


def test_a_norm_without_statistics_and_affine_is_left_alone_and_listed() -> None:
    assert Backbone(build("LayerNorms beside BatchNorm")).left_alone == {
        "2": "it has neither statistics nor affine parameters"
    }


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, lambda m: torch.compile(nn.DataParallel(m))])
def test_wrappers_are_taken_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, x = build("BatchNorm2d"), images("BatchNorm2d")
    net = Backbone(wrap(model))
    assert type(net.model) is nn.Sequential
    x = x.to(net.device)  # DataParallel moves a model to the GPU where there is one
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


@pytest.fixture
def one_process() -> Iterator[None]:
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    except RuntimeError as error:
        pytest.skip(f"no process group here: {error}")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_is_taken_off() -> None:
    model, x = build("BatchNorm2d"), images("BatchNorm2d")
    net = Backbone(nn.parallel.DistributedDataParallel(model))
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


def test_source_lies_where_the_model_lies() -> None:
    """Catches stand-ins for missing parameters, or for missing statistics, made on another device."""
    for name in ("affine=False", "neither", "LayerNorm", "LayerNorms beside BatchNorm"):
        affine, stats = Backbone(build(name).to("meta")).source()
        assert {t.device.type for t in (*affine, *stats)} == {"meta"}


def test_casting_the_network_leaves_the_source_exact() -> None:
    """Catches statistics that went to half precision and back."""
    net = Backbone(build("BatchNorm2d"))
    before = net.source()
    assert net.half().dtype == torch.float16
    assert all(
        torch.equal(a, b) for old, new in zip(before, net.source(), strict=True) for a, b in zip(old, new, strict=True)
    )


@pytest.mark.parametrize("first", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("then", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["tribe", "rotta"])
def test_an_adapter_goes_on_in_another_precision(method: str, first: torch.dtype, then: torch.dtype) -> None:
    """Catches statistics in another precision than the moments they meet, and layers exported in an old one."""
    model, x = build("BatchNorm2d").to(first), images("BatchNorm2d")[0]
    adapter = tribe.adapt(model, method)
    adapter(x)
    before = adapter.predict(x).float()
    adapter.to(then)
    assert gap(adapter.predict(x).float(), before) < 5e-2
    adapter(x)
    wide = torch.promote_types(then, torch.float32)
    assert {t.dtype for t in (*adapter.net.source()[0], *adapter.net.source()[1])} == {wide}
    kept = {name: t.dtype for name, t in leaves(adapter.state).items() if t.is_floating_point()}
    fresh = leaves(tribe.adapt(copy.deepcopy(model).to(then), method).state)
    for name, dtype in kept.items():  # an image that was remembered may stay in half
        assert dtype in (fresh[name].dtype, torch.promote_types(fresh[name].dtype, torch.float32)), name
    exported = adapter.export()
    assert {p.dtype for p in exported.parameters()} == {then}
    assert gap(exported(x.to(then)).float(), adapter.predict(x).float()) < (1e-5 if then == wide else 1e-2)


# -- refusals -------------------------------------------------------------------------------------------------------


def lazy() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.Linear(144, 4))


def test_lazy_layers_work_once_their_size_is_known() -> None:
    model, x = lazy(), images("BatchNorm2d")
    model(x[0])
    net = Backbone(model)
    assert gap(net(x, *net.source(), FROZEN).logits[0], model.eval()(x[0])) <= 1e-5


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), Doubled(4)),
            "none of .* can be adapted .*1: Doubled has a custom forward",
        ),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU()), "no normalisation layers.*folded into the convolutions"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False)), "neither statistics nor affine"),
        (lazy(), "size of layer '1' is not known yet: run the model once"),
        (nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4)), "size of layer '0' is not known yet"),
        (torch.jit.script(small()), "the model was compiled by torch.jit .*: give the eager module"),
        (torch.jit.trace(small(), torch.rand(2, 3, 8, 8)), "the model was compiled by torch.jit .*: give the eager"),
        (Backbone(small()), "Backbone is or holds a tribe.Backbone.* tribe.adapt takes a Backbone as it is"),
        (tribe.adapt(small()), r"Adapter is or holds a tribe.Backbone.* its .net .* its .export\(\)"),
    ],
)
def test_a_model_that_cannot_be_adapted_is_refused_in_words(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Backbone(model)


def test_a_compiled_part_that_learned_nothing_does_no_harm() -> None:
    with pytest.raises(ValueError, match=r"layer '0' was compiled by torch.jit"):
        Backbone(nn.Sequential(torch.jit.script(small()[:3]), small()[3:]))
    model, x = nn.Sequential(torch.jit.script(nn.Softsign()), build("BatchNorm2d")).eval(), images("BatchNorm2d")
    assert gap(run(model).logits[0], model(x[0])) <= 1e-5


class Cut(nn.Module):
    """Gives logits without a gradient, as networks do that are made for inference."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.head, self.how = small()[:-1], small()[-1], how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "detach":
            return self.head(self.inner(x).detach())
        with torch.inference_mode() if self.how == "inference_mode" else torch.no_grad():
            return self.head(self.inner(x))


@pytest.mark.parametrize("how", ["detach", "no_grad", "inference_mode"])
def test_a_network_that_cuts_gradients_is_refused_in_words_where_one_is_needed(how: str) -> None:
    adapter, x = tribe.adapt(Cut(how), "tent"), images("BatchNorm2d")[0]
    before = adapter.digest()
    with pytest.raises(ValueError, match=r"logits without a gradient.* torch.no_grad, torch.inference_mode or .detach"):
        adapter(x)
    assert adapter.digest() == before
    assert tribe.adapt(Cut(how), "bn")(x).shape == (6, 4)


@pytest.mark.parametrize("method", [name for name in tribe.methods.names() if name not in ("eata", "petal", "ttac")])
def test_without_affine_parameters_methods_that_learn_nothing_else_are_refused_in_words(method: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(144, 4))
    net, x = Backbone(model), torch.rand(1, 64, 3, 8, 8)
    if method in ("source", "bn", "lame", "cotta"):
        assert tribe.adapt(net, method)(x).shape == (1, 64, 4)
        return
    words = r"no normalisation layer .* has affine parameters .*Choose one that needs none: bn, lame, cotta, petal"
    with pytest.raises(ValueError, match=words):
        tribe.adapt(net, method)
    rule = tribe.methods.create(method, classes=4)
    with pytest.raises(ValueError, match=words):  # a pass without a shell says it, too
        rule.step(net, rule.init(net), x)


class Reads(nn.Module):
    """Asks a normalisation layer for something."""

    def __init__(self, ask: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.ask = small(), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.ask(self.inner[1], x)


@pytest.mark.parametrize("what", ["weight", "running_mean", "_check_input_dim"])
def test_reading_a_layer_past_its_call_is_refused_in_words(what: str) -> None:
    def ask(layer: Any, x: Tensor) -> Tensor:
        return 0 * getattr(layer, what).sum()

    with pytest.raises(
        AttributeError, match=rf"reads '{what}' of .* layer 'inner.1' .* call the layer, as in self.norm"
    ):
        run(Reads(ask))


def test_settings_of_a_layer_may_be_read() -> None:
    model = Reads(lambda layer, x: torch.full((), layer.num_features * layer.momentum))
    model.inner.eval()
    x = images("BatchNorm2d")
    assert gap(run(model, x).logits[0], model(x[0])) <= 1e-5
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        run(Reads(lambda layer, x: layer.nonsense))


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module; got function"):
        Backbone(lambda x: x)  # type: ignore[arg-type]


def run(model: nn.Module, x: Tensor | None = None) -> Output:
    net = Backbone(model)
    x = images("BatchNorm2d") if x is None else x
    return net(x, *net.source(len(x)), FROZEN)


def test_a_tuple_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"returned tuple; expected logits or an object with .logits"):
        run(Wrapped(lambda y: (y, y)))


@pytest.mark.parametrize("change", [lambda y: y[:, :, None], lambda y: y[:3], lambda y: y.sum()])
def test_logits_of_another_shape_are_refused_in_words(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"for 6 images; expected logits \(N, classes\)"):
        run(Wrapped(change))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, partial(nn.GroupNorm, 2)])
def test_a_model_that_mixes_images_is_refused_in_words(norm: Callable[[int], nn.Module]) -> None:
    """Catches rows and samples that are told apart by their place when their places are gone."""

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small(norm)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x[: len(x) // 2 + 1])

    with pytest.raises(
        ValueError, match=r"received 7 samples where the pass has 2 x 6: the model mixes or drops images"
    ):
        run(Mixes(), images("BatchNorm2d", 2))


@pytest.mark.parametrize(("shape", "words"), [((5, 8, 8), "takes 3 channels"), ((8, 8), r"4 axes, \(B, 3, ...\)")])
def test_images_of_another_shape_are_refused_in_words(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(small(), torch.rand(1, 6, *shape))


def test_arguments_of_another_shape_are_refused_in_words() -> None:
    """Catches class statistics under a rule for one: with as many samples as classes they would broadcast."""
    net, x = Backbone(small()), images("BatchNorm2d", 2)
    affine, stats = net.source(2)
    with pytest.raises(ValueError, match=r"2 rows and the network 14 channels; affine is \(3, 14\)"):
        net(x, net.source(3)[0], stats, FROZEN)
    with pytest.raises(ValueError, match=r"1 statistics per channel .* stats is \(2, 6, 14\)"):
        net(x, affine, net.source(2, classes=6)[1], FROZEN)
    with pytest.raises(ValueError, match=r"4 statistics per channel .* stats is \(2, 1, 14\)"):
        net(x, affine, stats, BALANCED)


# -- the current pass -----------------------------------------------------------------------------------------------


def test_a_slot_outside_a_pass_raises() -> None:
    with pytest.raises(RuntimeError, match="'1' was used outside a pass: call the Backbone"):
        Backbone(small()).model(torch.rand(2, *IMAGE))


class Elsewhere(nn.Module):
    """Runs its inner network in some other way than by calling it."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.run = small(), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inner, x)


def in_a_thread(inner: nn.Module, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inner, x).result()


@pytest.mark.parametrize("run", [in_a_thread, partial(checkpoint, use_reentrant=False)])
def test_layers_that_run_outside_the_pass_raise_with_the_reason(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    net = Backbone(Elsewhere(run))
    affine, stats = net.source()
    affine = Affine(*(t.requires_grad_() for t in affine))
    message = r"torch.utils.checkpoint,.* \(turn checkpointing off\), .* in another thread"
    with pytest.raises((ValueError, RuntimeError), match=message):
        net(images("BatchNorm2d"), affine, stats, BATCH).logits.sum().backward()


class Viewed(nn.Module):
    """Flattens feature maps with view, which channels-last order does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).view(len(x), -1))


def test_a_pass_with_labels_is_repeated_without_channels_last() -> None:
    """Catches a second try that groups labels which the first try has grouped."""
    model, x = Viewed(), images("BatchNorm2d")
    model(x[0])
    net, again = Backbone(model), Backbone(model)
    affine, stats, _, labels, valid = different_rows(net, BALANCED, 1)
    first = net(x, affine, stats, BALANCED, labels, valid)
    again(x, *again.source(), FROZEN)
    second = again(x, affine, stats, BALANCED, labels, valid)
    assert net.moves == again.moves == 1
    assert torch.equal(first.logits, second.logits)


class Listed(nn.Module):
    """Calls its layers by references that are not modules of its own."""

    def __init__(self, through: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.conv, self.norm, self.second, self.head = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), None, nn.Linear(5, 4)
        self.steps = [self.conv, through(self.norm)]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return self.head((x if self.second is None else self.second(x)).mean((2, 3)))


def test_layers_in_a_list_are_adapted_and_exported() -> None:
    """Catches a layer that is called past the slot that stands for it among the modules."""
    torch.manual_seed(0)
    model, x = Listed(lambda norm: norm).eval(), images("BatchNorm2d")
    net = Backbone(model)
    affine, stats, *_ = different_rows(net, FROZEN, 1)
    for other in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert gap(other(x, *other.source(), FROZEN).logits[0], model(x[0])) <= 1e-5
        y = other(x, affine, stats, FROZEN).logits
        assert gap(y[0], model(x[0])) > 1e-3
        assert gap(other.plain(affine, stats)(x[0]), y[0]) <= 1e-5
        weights = {name: 1.1 * p for name, p in other.model.named_parameters()}
        y = other(x, affine, stats, FROZEN, weights=weights).logits
        assert gap(other.plain(affine, stats, weights)(x[0]), y[0]) <= 1e-5


def test_layers_that_no_pass_calls_are_named_once() -> None:
    model, x = Listed(lambda norm: norm.forward), images("BatchNorm2d")
    with pytest.raises(ValueError, match=r"called none of its normalisation layers.*self.norm.forward"):
        run(model)
    model.second = nn.BatchNorm2d(5)
    net = Backbone(model)
    with pytest.warns(UserWarning, match=r"did not call do not adapt: norm\. .* auxiliary head"):
        net(x, *net.source(), FROZEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x, *net.source(), FROZEN)


@pytest.mark.parametrize("error", [RuntimeError("late"), KeyError("late"), KeyboardInterrupt()])
def test_the_current_pass_is_cleared_after_an_error(error: BaseException) -> None:
    """Catches a pass that outlives its forward, so that the next use of a slot takes another's arguments."""

    def fail(y: Tensor) -> Tensor:
        raise error

    net, x = Backbone(Wrapped(fail)), images("BatchNorm2d")
    with pytest.raises((type(error), ValueError)):
        net(x, *net.source(), FROZEN)
    with pytest.raises(RuntimeError, match="outside a pass"):
        net.model(x[0])


def test_threads_with_one_backbone_do_not_meet() -> None:
    """Catches a current pass that all threads share: a thread gets the rows, rules and labels of another."""
    net = Backbone(build("nested"))
    rules = [FROZEN, BATCH, norms.create("robust", alpha=0.3), BALANCED]
    work = [
        (images("nested", 1 + i % 2, 4 + i, i), different_rows(net, r, 1 + i % 2, 4 + i, i))
        for i, r in enumerate(rules)
    ]

    def once(x: Tensor, arguments: Arguments) -> list[Tensor]:
        leaves = Affine(*(t.clone().requires_grad_() for t in arguments.affine))
        out = net(x, leaves, *arguments[1:])
        return [out.logits, *out.stats, *torch.autograd.grad(out.logits.square().sum(), leaves)]

    alone = [once(*w) for w in work]
    worst: list[float] = []

    def often(i: int) -> None:
        worst.append(max(gap(a, b) for _ in range(40) for a, b in zip(once(*work[i]), alone[i], strict=True)))

    threads = [threading.Thread(target=often, args=(i,)) for i in range(len(work))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(worst) == len(work)  # a thread that raised would be missing
    assert max(worst) < 1e-5


@pytest.mark.parametrize("own", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_a_pass_with_weights_of_its_own_meets_no_other(own: tuple[bool, bool]) -> None:
    """One thread stands in the middle of its pass while another makes a whole one, and looks around."""
    meet: list[Callable[[], None]] = []

    class Halfway(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if meet:
                meet.pop()()
            return x

    torch.manual_seed(0)
    net, x = Backbone(nn.Sequential(small()[:3], Halfway(), small()[3:])), images("BatchNorm2d")
    mark, source = net.fingerprint(), WeightLayout(net).source().weights
    weights = [
        {name: factor * p for name, p in net.model.named_parameters()} if its else None
        for its, factor in zip(own, (2, 3), strict=True)
    ]

    def go(i: int) -> Tensor:
        return net(x, *net.source(), FROZEN, weights=weights[i]).logits

    alone = go(0), go(1)
    assert (gap(*alone) > 1e-3) == any(own)
    found: list[Any] = []

    def visit() -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(go, 1).result(60))
            found.append(pool.submit(net.fingerprint).result(60))
            found.append(pool.submit(lambda: WeightLayout(net).source().weights).result(60))

    meet.append(visit)
    assert torch.equal(go(0), alone[0])
    assert torch.equal(found[0], alone[1])
    assert found[1] == mark
    assert torch.equal(found[2], source)


def test_threads_with_methods_that_move_all_weights_do_not_meet() -> None:
    model, methods = build("BatchNorm2d"), ["cotta", "tent", "cotta"]
    alone = [tribe.adapt(model, name, seed=i) for i, name in enumerate(methods)]
    net = Backbone(model)
    threaded = [tribe.adapt(net, name, seed=i) for i, name in enumerate(methods)]

    def drive(adapters: list[Any], i: int) -> None:
        for seed in range(6):
            adapters[i](images("BatchNorm2d", seed=10 * i + seed)[0])

    for i in range(len(methods)):
        drive(alone, i)
    with ThreadPoolExecutor(len(methods)) as pool:
        list(pool.map(partial(drive, threaded), range(len(methods))))
    assert [a.digest() for a in threaded] == [a.digest() for a in alone]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_has_weights_of_its_own(again: Callable[[Backbone], Backbone]) -> None:
    """Catches a double that outlives the network it was made of, or a cast of it."""
    net, x = Backbone(build("BatchNorm2d")), images("BatchNorm2d")
    some = {"0.weight": 2 * net.model[0].weight}
    before = net(x, *net.source(), FROZEN, weights=some).logits
    other = again(net)
    with torch.no_grad():
        net.model[8].weight.zero_()
    assert torch.equal(other(x, *other.source(), FROZEN, weights=some).logits, before)
    assert not torch.equal(net(x, *net.source(), FROZEN, weights=some).logits, before)
    net.double()
    y = net(x, *net.source(), FROZEN, weights={name: t.double() for name, t in some.items()}).logits
    assert y.dtype == torch.float64


# -- features -------------------------------------------------------------------------------------------------------


def input_of(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    seen = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    handle.remove()
    return seen[-1]


@pytest.mark.parametrize(
    ("name", "found"), [("BatchNorm2d", "8"), ("nested", "head"), ("TransformerEncoder", "head"), ("video", "head")]
)
def test_features_are_the_classifiers_input_found_automatically(name: str, found: str) -> None:
    model, x = build(name), images(name, 2)
    net = Backbone(model)
    assert (net.classifier, net.classes) == (found, 4)
    features = net(x, *net.source(2), FROZEN).features
    assert features is not None
    for r in range(2):
        assert gap(features[r], input_of(model, model.get_submodule(found), x[r])) <= 1e-5


def test_features_are_the_input_of_the_layer_named() -> None:
    model, x = build("BatchNorm2d"), images("BatchNorm2d")
    net = Backbone(model, classifier="6")  # the pooling: its input has pixels, which are averaged
    features = net(x, *net.source(), FROZEN).features
    assert features is not None
    assert gap(features[0], input_of(model, model[6], x[0]).mean((2, 3))) <= 1e-5


def test_a_convolution_of_one_pixel_serves_as_classifier() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*small()[:7], nn.Conv2d(8, 4, 1), nn.Flatten()).eval()
    net, x = Backbone(model), images("BatchNorm2d")
    features = net(x, *net.source(), FROZEN).features
    assert net.classes == 4
    assert features is not None
    assert gap(features[0], input_of(model, model[7], x[0]).flatten(1)) <= 1e-5


def test_there_are_no_features_where_frames_are_classified_one_by_one() -> None:
    """Catches features of B T frames handed out as if they were those of B images."""
    net, x = Backbone(build("video by frame")), images("video by frame")
    assert net(x, *net.source(), FROZEN).features is None


def test_an_unknown_classifier_is_refused_with_the_known_layers() -> None:
    with pytest.raises(ValueError, match=r"no layer 'fc' to take features from; it has 0, 1, "):
        Backbone(small(), classifier="fc")


# -- weights and identity -------------------------------------------------------------------------------------------


def test_other_weights_change_the_logits_and_receive_gradients() -> None:
    model, x = build("BatchNorm2d"), images("BatchNorm2d")
    net = Backbone(model)
    weights = {name: (1.1 * p.detach()).requires_grad_() for name, p in net.model.named_parameters()}
    assert set(weights) == {"0.weight", "3.weight", "8.weight", "8.bias"}
    y = net(x, *net.source(), FROZEN, weights=weights).logits
    grads = torch.autograd.grad(y.square().sum(), list(weights.values()))
    assert all(g.abs().max() > 1e-6 for g in grads)
    before = net(x, *net.source(), FROZEN).logits
    assert gap(y, before) > 1e-3
    model.load_state_dict(weights, strict=False)
    assert gap(y[0], model(x[0])) <= 1e-5
    assert not any(p.requires_grad for p in net.model.parameters())


def test_fingerprint_tells_models_apart_and_nothing_else() -> None:
    model = build("BatchNorm2d")
    mark = Backbone(model).fingerprint()
    assert (
        mark
        == Backbone(copy.deepcopy(model)).fingerprint()
        == Backbone(nn.DataParallel(copy.deepcopy(model))).fingerprint()
    )
    assert mark == Backbone(copy.deepcopy(model).to(memory_format=torch.channels_last).train()).fingerprint()
    net = Backbone(model)
    net(images("BatchNorm2d"), *net.source(1, 4), BALANCED, torch.zeros(1, 6, dtype=torch.int64))
    assert mark == net.fingerprint()
    for key in ("0.weight", "1.weight", "4.bias", "1.running_mean", "4.running_var", "8.bias"):
        other = copy.deepcopy(model)
        other.state_dict()[key].view(-1)[0] += 1e-3
        assert Backbone(other).fingerprint() != mark, key


def test_fingerprint_tells_eps_apart() -> None:
    """And the usual one is not in it: marks that were taken before it counted must not change."""
    model = build("BatchNorm2d")
    model[4] = Doubled(8)  # left alone; it counts all the same
    mark = Backbone(model).fingerprint()
    for index, eps in ((1, 1e-3), (4, 1e-3), (1, 1e-6)):
        other = copy.deepcopy(model)
        other[index].eps = eps
        assert Backbone(other).fingerprint() != mark
        assert Backbone(other).fingerprint(exact=False) != Backbone(model).fingerprint(exact=False)


def test_the_fingerprint_of_the_committed_network_is_the_one_in_the_results() -> None:
    place = tribe.models.find("compact", "mnist", ROOT)
    if place is None:
        pytest.skip("its weights are not here")
    net = Backbone(tribe.models.load("compact", place))
    assert net.fingerprint() == "939b0640950ccd5ac9bba7820258a128"


@each_model
def test_every_model_has_a_fingerprint_of_its_own(name: str) -> None:
    assert Backbone(build(name)).fingerprint() == Backbone(build(name)).fingerprint()
    assert Backbone(build(name)).fingerprint() != Backbone(build(name, seed=1)).fingerprint()


def test_source_hands_out_copies() -> None:
    """Catches an adaptation that moves the source it should be able to return to."""
    net = Backbone(build("BatchNorm2d"))
    affine, stats = net.source(2, 3)
    assert affine.weight.shape == (2, 14)
    assert stats.mean.shape == (2, 3, 14)
    for t in (*affine, *stats):
        t.add_(1)
    assert gap(net.source(2, 3)[0].weight + 1, affine.weight) == 0
    assert gap(net.source(2, 3)[1].var + 1, stats.var) == 0


def test_slots_hold_nothing_that_adapts() -> None:
    """Two passes with different arguments leave no trace: the first repeats exactly."""
    net, x = Backbone(build("nested")), images("nested", 2)
    one, two = different_rows(net, BALANCED, 2, seed=1), different_rows(net, BATCH, 2, seed=2)
    before = net(x, *one)
    net(x, *two)
    assert torch.equal(before.logits, net(x, *one).logits)
    assert not any(True for slot in net.slots for _ in slot.parameters())
    assert all(isinstance(slot, Slot) for slot in net.slots)
