"""TRIBE in the structure of the released code: three networks and one launch at a time. Benchmarks compare with it.

It is the method of `tribe.methods.tribe`, in the released convention. Teacher, student and anchor are copies of the
network. Modules that keep class statistics replace the BatchNorm layers and read the pseudo labels from an attribute.
Every equation is a line over pixels, and torch's Adam updates the parameters. It runs one stream. The library's speed
is measured as a ratio to it, which can be done on any machine.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tribe.core.rng import Key
from tribe.methods.tribe import Tribe


class ClassNorm(nn.Module):
    """Balanced BN as a layer: it normalises; if ``label`` is set, it first learns from the batch."""

    def __init__(self, layer: Any, method: Tribe) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.eta, self.gamma = float(method.eta or 0), float(method.gamma or 0)
        self.register_buffer("mean", layer.running_mean.expand(method.classes, -1).clone())  # (K, C)
        self.register_buffer("var", layer.running_var.expand(method.classes, -1).clone())
        self.act = getattr(layer, "act", nn.Identity())  # of a layer with an activation
        self.label: Tensor | None = None  # (B,)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = (self.mean, self.var) if self.label is None else self.updated(x, self.label)
        self.mean, self.var = mean.detach(), var.detach()
        pooled_mean, pooled_var = mean.mean(0), var.mean(0) + mean.var(0, correction=1)  # Eq. 2
        over = (1, -1, *[1] * (x.dim() - 2))
        y = (x - pooled_mean.view(over)) / (pooled_var.view(over) + self.eps).sqrt()
        return self.act(y * self.weight.view(over) + self.bias.view(over))  # type: ignore[no-any-return]

    def updated(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class statistics after this batch: Eqs. 1, 3 and 4."""
        pixels = tuple(range(2, x.dim()))
        count = torch.zeros_like(self.mean[:, :1]).index_add(0, label, torch.ones_like(x[:, :1].flatten(1)[:, :1]))
        present = count > 0  # (K, 1)
        rate = torch.where(count > 1 / self.eta, 1 / count.clamp_min(1), self.eta)
        off = x - self.mean[label].view(*x.shape[:2], *[1] * len(pixels))
        delta = torch.zeros_like(self.mean).index_add(0, label, off.mean(pixels)) * rate
        square = torch.zeros_like(self.mean).index_add(0, label, off.square().mean(pixels)) * rate
        mean = self.mean + (1 - self.gamma) * delta
        var = self.var + (1 - self.gamma) * (square - rate * count * self.var - delta.square())
        if self.gamma:
            classes = present.sum()
            mean = mean + self.gamma * delta.sum(0) / classes
            gained = (square - delta.square()).sum(0) / classes
            var = var + self.gamma * (gained - (rate * count).sum() / classes * var)
        return mean, var


class Released:
    """TRIBE for one stream; a call predicts a batch (B, ...) and adapts."""

    def __init__(self, model: nn.Module, method: Tribe, seed: int = 0) -> None:
        self.method = method
        self.teacher, self.student, self.anchor = (_with_class_norms(model, method) for _ in range(3))
        self.anchor.requires_grad_(False)
        teacher_layers = dict(self.teacher.named_modules())
        parameters = []
        for name, layer in self.student.named_modules():
            if isinstance(layer, ClassNorm):
                layer.weight, layer.bias = teacher_layers[name].weight, teacher_layers[name].bias
                parameters += [layer.weight, layer.bias]
        self.adam = torch.optim.Adam(parameters, lr=method.lr)
        device = parameters[0].device
        self.key = Key(torch.tensor([seed], device=device), torch.zeros(1, dtype=torch.int64, device=device))

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            prediction = _labelled(self.teacher, None)(x)
            label = prediction.argmax(1)
            anchor = _labelled(self.anchor, label)(x)
            view = self.method.augment(x[None], self.key)[0]  # type: ignore[operator,arg-type,call-arg]
        teacher, student = _labelled(self.teacher, label)(x), _labelled(self.student, label)(view)
        p = teacher.detach().softmax(1)
        entropy = -(p * p.log()).nan_to_num().sum(1)
        trusted = entropy < float(self.method.h0 or 0) * math.log(self.method.classes or 0)
        self.adam.zero_grad()
        if trusted.any():
            loss = F.cross_entropy(student[trusted], teacher.argmax(1)[trusted])  # Eq. 5
            loss = loss + self.method.lambda_anc * F.mse_loss(teacher[trusted], anchor[trusted])  # Eq. 6
        else:
            loss = 0 * student.sum() + 0 * teacher.sum()
        loss.backward()
        self.adam.step()
        self.key = self.key._replace(clock=self.key.clock + 1)
        return prediction

    def nbytes(self) -> int:
        """Return the size of the state: class statistics of three networks, parameters, and Adam's moments of them."""
        layers = [m for net in (self.teacher, self.student, self.anchor) for m in net.modules()]
        statistics = sum(t.nbytes for m in layers if isinstance(m, ClassNorm) for t in (m.mean, m.var))
        return statistics + 3 * sum(p.nbytes for group in self.adam.param_groups for p in group["params"])


def _with_class_norms(model: nn.Module, method: Tribe) -> nn.Module:
    model = copy.deepcopy(model).eval().requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, _BatchNorm):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ClassNorm(layer.requires_grad_(True), method))
    return model


def _labelled(model: nn.Module, label: Tensor | None) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, ClassNorm):
            layer.label = label
    return model
