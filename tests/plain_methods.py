"""Methods as plain PyTorch loops, from the equations of their papers: ordinary layers, backward() and torch.optim.

One stream, one image after another where that is clearer. Each takes the network, the batches of images and the method,
whose fields it reads; it returns the output for each batch, and tensors of the state at the end, by their names. They
share no code with the library but the network that `Backbone.plain` makes of ordinary layers, and random draws.
"""

import copy
import math

import numpy as np
import torch
from torch import nn

import reference
from plain_places import PlainProbes, PlainWorld, pixels_of, raw
from tribe import norms
from tribe.core import memory, rng
from tribe.core.all_weights import WeightLayout
from tribe.core.optim import adam_init, adam_step
from tribe.core.rng import Key
from tribe.core.rules import Frozen
from tribe.core.state import leaves
from tribe.methods.deyo import SHUFFLE


def ordinary(net, statistics=None):
    """The network with ordinary layers, and the scales and shifts of its BatchNorm layers in order.

    Without ``statistics`` its BatchNorm layers use each batch's own.
    """
    module = net.plain(net.source()[0], statistics)
    layers = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    for layer in layers:
        layer.requires_grad_(True)
    return module, [m.weight for m in layers], [m.bias for m in layers]


def entropy_of(logits):
    """Of one image."""
    return -(logits.softmax(0) * logits.log_softmax(0)).sum()


def entropies(logits):
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def optimiser_of(method, parameters, **sgd):
    """The optimiser that a method's fields describe."""
    if getattr(method, "optimizer", "adam") == "adam":
        return torch.optim.Adam(parameters, lr=method.lr)
    return torch.optim.SGD(parameters, lr=method.lr, momentum=getattr(method, "momentum", 0.9), **sgd)


def descend(optimiser, loss):
    """Take one step down the gradient of a loss."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def learned(weights, biases, prefix="affine."):
    """Scales and shifts of all layers, as a state names them."""
    return {
        f"{prefix}{name}": torch.cat([t.detach() for t in ts]) for name, ts in (("weight", weights), ("bias", biases))
    }


def pl(net, xs, method):
    """Pseudo labels (2013): Adam on the cross-entropy with the most likely class."""
    module, weights, biases = ordinary(net)
    step, outputs = optimiser_of(method, [*weights, *biases]), []
    for x in xs:
        logits = module(x)
        outputs.append(logits.detach())
        descend(step, nn.functional.cross_entropy(logits, logits.argmax(1)))
    return outputs, learned(weights, biases)


def settle(logits, features, neighbours=5, rounds=100, settled=1e-8):
    """LAME's assignments of a batch, an image and a class at a time."""
    count, classes = logits.shape
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    unary = -np.log(p + 1e-10)
    f = features / np.linalg.norm(features, axis=1, keepdims=True)
    near = []
    for i in range(count):
        distances = sorted((float(np.sqrt(((f[i] - f[j]) ** 2).sum())), j) for j in range(count) if j != i)
        near.append([j for _, j in distances[:neighbours]])

    def softmax(z):
        e = np.exp(z - z.max())
        return e / e.sum()

    y, old = np.stack([softmax(-u) for u in unary]), math.inf
    for step in range(rounds):
        pull = np.stack([sum((y[j] for j in near[i]), np.zeros(classes)) for i in range(count)])
        y = np.stack([softmax(pull[i] - unary[i]) for i in range(count)])
        energy = (unary * y - pull * y + y * np.log(np.maximum(y, 1e-20))).sum()
        if step >= 2 and abs(energy - old) <= settled * abs(old):
            break
        old = energy
    return y


def lame(net, xs, method):
    """LAME (CVPR 2022)."""
    passes = [net(x[None], *net.source(), Frozen()) for x in xs]
    settings = {name: getattr(method, name) for name in ("neighbours", "rounds", "settled")}
    each = [settle(p.logits[0].numpy(), p.features[0].numpy(), **settings) for p in passes]
    return [torch.from_numpy(p).log() for p in each], {}


def eata(net, xs, method):
    """EATA (ICML 2022)."""
    module, weights, biases = ordinary(net)
    start = [p.detach().clone() for p in (*weights, *biases)]
    widths, known = [len(w) for w in weights], method.knowledge
    share = 1 if method.fisher == "sum" else 1 / known.spec["batches"]
    fisher = [share * f for name in ("weight", "bias") for f in known.tensors[name].split(widths)]
    step, mean, steps, outputs = optimiser_of(method, [*weights, *biases]), None, 0, []
    for x in xs:
        logits = module(x)
        outputs.append(logits.detach())
        limit = method.e0 * math.log(logits.shape[1])
        kept = []
        for i, p in enumerate(logits.detach().softmax(1)):
            alike = 0.0 if mean is None else float(mean @ p / mean.norm() / p.norm())
            if float(entropy_of(logits[i].detach())) < limit and (mean is None or abs(alike) < method.d):
                kept.append(i)
        if not kept:
            continue
        loss = 0
        for i in kept:
            doubt = entropy_of(logits[i])
            loss = loss + math.exp(limit - float(doubt.detach())) * doubt / len(kept)
        for p, p0, f in zip((*weights, *biases), start, fisher, strict=True):
            loss = loss + method.alpha * (f * (p - p0) ** 2).sum()
        descend(step, loss)
        seen = logits.detach()[kept].softmax(1).mean(0)
        mean = seen if mean is None else 0.9 * mean + 0.1 * seen
        steps += 1
    assert 0 < steps < len(xs) or method.d > 0.5, "every batch was learned from: the choice was not tested"
    return outputs, learned(weights, biases) | {"mean": mean, "adam.steps": torch.tensor(steps)}


def sar(net, xs, method):
    """SAR (ICLR 2023), but for its recovery. A frozen tail is the layer "1", the second layer, or none."""
    module, weights, biases = ordinary(net)
    adapted = {("1",): [1], 0.5: [0], 0.0: [0, 1]}[method.frozen_tail]
    parameters = [p for i in adapted for p in (weights[i], biases[i])]
    step, mean, outputs = torch.optim.SGD(parameters, lr=method.lr, momentum=method.momentum), None, []
    for x in xs:
        here = [p.detach().clone() for p in parameters]
        logits = module(x)
        outputs.append(logits.detach())
        doubt, limit = entropies(logits), method.e0 * math.log(logits.shape[1])
        reliable = doubt < limit
        if reliable.any():
            slope = torch.autograd.grad(doubt[reliable].mean(), parameters)
            length = math.sqrt(sum(float((g.detach() ** 2).sum()) for g in slope))
            with torch.no_grad():
                for p, g in zip(parameters, slope, strict=True):
                    p += method.rho * g / length
        doubt = entropies(module(x))
        still = reliable & (doubt < limit)
        slope = torch.autograd.grad(doubt[still].mean() if still.any() else 0 * doubt.sum(), parameters)
        with torch.no_grad():
            for p, p0, g in zip(parameters, here, slope, strict=True):
                p.copy_(p0)
                p.grad = g
        step.step()
        if still.any():
            loss = float(doubt[still].detach().mean())
            mean = loss if mean is None else 0.9 * mean + 0.1 * loss
    return outputs, learned(weights, biases) | {"mean": torch.tensor(mean, dtype=weights[0].dtype)}


def towards_source(method, parameters, start):
    for now, then in zip(parameters, start, strict=True):
        now.copy_(method.alpha * now + (1 - method.alpha) * then)


def roid(net, xs, method, ensemble=towards_source):
    """ROID (WACV 2024) without its prior."""
    module, weights, biases = ordinary(net)
    parameters = [*weights, *biases]
    start = [p.detach().clone() for p in parameters]
    step, mean, outputs = optimiser_of(method, parameters, nesterov=True), None, []
    for x in xs:
        logits = module(x)
        count, classes = logits.shape
        p = logits.detach().softmax(1)
        mean = torch.full_like(p[0], 1 / classes) if mean is None else mean
        diversity = torch.stack([1 - mean @ q / mean.norm() / q.norm() for q in p])
        diversity = (diversity - diversity.min()) / (diversity.max() - diversity.min())
        certainty = torch.stack([-entropy_of(z) for z in logits.detach()])
        certainty = (certainty - certainty.min()) / (certainty.max() - certainty.min())
        kept = [i for i in range(count) if diversity[i] >= diversity.mean()]
        other = module(method.augment(x)[kept])
        loss = 0
        for row, i in enumerate(kept):
            q = logits[i].softmax(0).clamp(max=0.99)
            ratio = -sum(v * torch.log(v / (1 - v) + 1e-5) for v in q)
            a, b = logits[i], other[row]
            agree = -0.5 * (a.softmax(0) * b.log_softmax(0)).sum() - 0.5 * (b.softmax(0) * a.log_softmax(0)).sum()
            loss = loss + math.exp(float(diversity[i] * certainty[i]) / method.tau) * (ratio + agree) / count
        descend(step, loss)
        with torch.no_grad():
            ensemble(method, parameters, start)
        mean = method.beta * mean + (1 - method.beta) * p.mean(0)
        outputs.append(p.log())
    return outputs, learned(weights, biases) | {"mean": mean}


def cmf(net, xs, method):
    """CMF (ICLR 2024): ROID with a Kalman filter in place of its ensemble, a number at a time."""
    hidden, v = [], 0.0
    gain = method.q * sum(slot.channels for slot in net.slots) * 2 / 38400  # scales and shifts

    def ensemble(method, parameters, start):
        nonlocal hidden, v
        hidden = hidden or [p.tolist() for p in start]
        v = method.alpha**2 * v + gain
        beta = max((1 - gain) / (v + 1 - gain), 0.89)
        beta = beta if beta < 0.9999 else 1.0
        v = beta * v
        for h, learned, source in zip(hidden, parameters, start, strict=True):
            for i in range(len(h)):
                predicted = method.alpha * h[i] + (1 - method.alpha) * float(source[i])
                h[i] = beta * predicted + (1 - beta) * float(learned[i])
                learned[i] = method.gamma * learned[i] + (1 - method.gamma) * h[i]

    outputs, named = roid(net, xs, method, ensemble)
    numbers = [torch.tensor(h, dtype=xs[0].dtype) for h in hidden]
    half = len(numbers) // 2
    named |= learned(numbers[:half], numbers[half:], "hidden.") | {"variance": torch.tensor(v, dtype=xs[0].dtype)}
    return outputs, named


def in_pieces(image, patches, order):
    """One image (C, H, W): the patch at place i comes from place order[i], row by row."""
    height, width = image.shape[1] // patches, image.shape[2] // patches
    mixed = torch.zeros_like(image)

    def at(place):
        row, column = place // patches * height, place % patches * width
        return slice(row, row + height), slice(column, column + width)

    for to, place in enumerate(order):
        (to_rows, to_columns), (rows, columns) = at(to), at(place)
        mixed[:, to_rows, to_columns] = image[:, rows, columns]
    return mixed


def orders(steps, batch, patches, seed=0):
    """The places of the patches of every image of a stream, as DeYO draws them."""
    keys = [rng.Key(torch.tensor([seed]), torch.tensor([clock])) for clock in range(steps)]
    return [rng.uniform(key, SHUFFLE, (batch, patches**2))[0].argsort(dim=-1, stable=True).tolist() for key in keys]


def deyo(net, xs, method):
    """DeYO (ICLR 2024); with a frozen tail, the second of two layers does not learn."""
    frozen = [1] if method.frozen_tail else []
    module, weights, biases = ordinary(net)
    learning = [p for i, pair in enumerate(zip(weights, biases, strict=True)) if i not in frozen for p in pair]
    step, outputs, taught = optimiser_of(method, learning), [], []
    for x, order in zip(xs, orders(len(xs), len(xs[0]), method.patches), strict=True):
        logits = module(x)
        outputs.append(logits.detach())
        unit = math.log(logits.shape[1])
        low = [i for i in range(len(x)) if float(entropy_of(logits[i].detach())) < method.tau_ent * unit]
        terms = []
        if low:
            with torch.no_grad():
                others = module(torch.stack([in_pieces(x[i], method.patches, order[i]) for i in low]))
            for i, other in zip(low, others, strict=True):
                entropy, label = entropy_of(logits[i]), int(logits[i].argmax())
                plpd = float(logits[i].softmax(0)[label].detach() - other.softmax(0)[label])
                if plpd > method.tau_plpd:
                    weight = 1 / math.exp(float(entropy.detach()) - method.ent_0 * unit) + 1 / math.exp(-plpd)
                    terms.append(weight * entropy)
        taught.append(len(terms))
        if terms:
            descend(step, sum(terms) / len(terms))
    assert any(0 < count < len(xs[0]) for count in taught), "every image was chosen, or none: the choice was not tested"
    return outputs, learned(weights, biases) | {"adam.steps": torch.tensor(sum(count > 0 for count in taught))}


class RobustNorm(nn.Module):
    """RoTTA's Robust BN: in training the running statistics follow the batch, and normalise it."""

    def __init__(self, layer, share):
        super().__init__()
        self.weight, self.bias, self.eps, self.share = layer.weight, layer.bias, layer.eps, share
        self.mean, self.var = layer.running_mean.clone(), layer.running_var.clone()

    def forward(self, x):
        mean, var = self.mean, self.var
        if self.training:
            own = x.mean((0, 2, 3))
            mean = (1 - self.share) * mean + self.share * own
            var = (1 - self.share) * var + self.share * x.var((0, 2, 3), unbiased=False)
            self.mean, self.var = mean.detach(), var.detach()
        mean, var, weight, bias = (t[None, :, None, None] for t in (mean, var, self.weight, self.bias))
        return weight * (x - mean) / (var + self.eps).sqrt() + bias


def replaced(module, make):
    """The network, a Sequential, with other layers in place of BatchNorm, and these layers."""
    places = [i for i, layer in enumerate(module) if isinstance(layer, nn.BatchNorm2d)]
    for i in places:
        module[i] = make(module[i])
    return module, [module[i] for i in places]


def robust(net, share):
    """The network with Robust BN, and its normalisation layers."""
    return replaced(ordinary(net, net.source()[1])[0], lambda layer: RobustNorm(layer, share))


def running(layers, prefix):
    """The running statistics of all layers, as a state names them."""
    return {f"{prefix}.{kind}": torch.cat([getattr(m, kind) for m in layers])[None] for kind in ("mean", "var")}


def branch(layers, prefix):
    """The parameters and the statistics of a branch, as a state names them."""
    affine = learned([m.weight for m in layers], [m.bias for m in layers], f"{prefix}.affine.")
    return affine | running(layers, f"{prefix}.stats")


def rotta(net, xs, method):
    """RoTTA (CVPR 2023), an image at a time, the memory as lists."""
    teacher, teacher_layers = robust(net, method.alpha)
    student, student_layers = robust(net, method.alpha)
    adam = torch.optim.Adam([p for layer in student_layers for p in (layer.weight, layer.bias)], lr=method.lr)
    images, bank = torch.cat(xs), reference.TimelyMemory(method.size, method.classes)
    outputs, arrived = [], 0
    for x in xs:
        teacher.eval()
        outputs.append(teacher(x).detach())
        for p in outputs[-1].softmax(1):
            bank.add(arrived, int(p.argmax()), float(-(p * (p + 1e-6).log()).sum()))
            arrived += 1
            if arrived % method.every:
                continue
            held = bank.contents()
            memory = images[[position for position, _, _ in held]]
            age = torch.tensor([age for _, _, age in held], dtype=x.dtype) / method.size
            teacher.train()
            loss = -(teacher(memory).detach().softmax(1) * student(method.augment(memory)).log_softmax(1)).sum(1)
            descend(adam, (loss * (-age).exp() / (1 + (-age).exp())).mean())
            with torch.no_grad():
                for own, other in zip(teacher_layers, student_layers, strict=True):
                    for name in ("weight", "bias"):
                        getattr(own, name).mul_(1 - method.nu).add_(method.nu * getattr(other, name))
    named = branch(teacher_layers, "teacher") | branch(student_layers, "student")
    return outputs, named | {"adam.steps": torch.tensor(arrived // method.every)}


def note(net, xs, method):
    """NOTE (NeurIPS 2022), an image at a time: when it learns, and from what. Passes and memory are the library's."""
    (affine, stats), bank, outputs, arrived = net.source(), method.init(net).memory, [], 0
    moments, real, seed = adam_init(affine), torch.ones(1, 1, dtype=torch.bool), torch.tensor([0])
    for x in xs:
        with torch.no_grad():
            logits = net(x[None], affine, stats, norms.create("instance")).logits
        outputs.append(logits[0])
        for i in range(len(x)):
            bank = memory.add_reservoir(bank, x[None, i : i + 1], logits[:, i : i + 1].argmax(-1), real, seed)
            arrived += 1
            if arrived % method.every == 0 if method.every else i == len(x) - 1:
                leaf, held = affine.leaf(), memory.images(bank, x.shape[1:])[:, : int(bank.held)]
                guess, _, stats = net(held, leaf, stats, norms.create("instance", observing=True))
                grads = leaf.gradient(entropies(guess).mean(1))
                affine, moments = adam_step(affine, grads, moments, method.lr)
    end = {"affine": affine, "stats": stats}
    named = {f"{name}.{field}": t[0] for name, part in end.items() for field, t in part._asdict().items()}
    return outputs, named | {
        "memory.image": bank.image[0],
        "memory.label": bank.label[0],
        "adam.steps": moments.steps[0],
    }


def features_by_class(net, xs, classes):
    """PeTTA's source knowledge: mean and variance of the features of the images predicted as each class."""
    module, _, _ = ordinary(net, net.source()[1])
    features = torch.cat([module[:-1](x).detach() for x in xs])
    labels = module[-1](features).argmax(1)
    enough = [k if int((labels == k).sum()) >= 2 else None for k in range(classes)]
    groups = [features if k is None else features[labels == k] for k in enough]
    return torch.stack([g.mean(0) for g in groups]), torch.stack([g.T.cov().diagonal() for g in groups])


def petta(net, xs, method):
    """PeTTA (NeurIPS 2024); its augmentation is a function without randomness."""
    f, source_mean, source_var = vars(method), *(method.knowledge.tensors[name].double() for name in ("mean", "var"))

    def cross_entropy(target, logits):
        return -(target.softmax(1) * logits.log_softmax(1)).sum(1)

    teacher, teacher_layers = robust(net, f["alpha_bn"])
    student, student_layers = robust(net, f["alpha_bn"])
    anchor, anchor_layers = robust(net, f["alpha_bn"])
    params = [p for layer in student_layers for p in (layer.weight, layer.bias)]
    start = copy.deepcopy(params)
    adam = torch.optim.Adam(params, lr=f["lr"])
    classes, seen = len(source_mean), []
    bank, mean, outputs, gammas = reference.TimelyMemory(f["size"], classes), source_mean.clone(), [], []
    for x in xs:
        with torch.no_grad():
            teacher.eval()
            features = teacher[:-1](x)
            logits = teacher[-1](features)
            outputs.append(logits)
            labels = logits.argmax(1).tolist()

            # Eq. 6, before the means follow the batch
            distances = [(mean[k] - source_mean[k]) ** 2 / (source_var[k] + 1e-6) for k in set(labels)]
            if f["sensing"] == "paper":
                gamma = sum(1 - math.exp(-float(d.sum())) for d in distances) / len(distances)
            else:
                gamma = 1 - math.exp(-float(torch.cat(distances).mean()))
            gammas.append(gamma)
            for k in set(labels):
                members = torch.stack([feature for feature, label in zip(features, labels, strict=True) if label == k])
                mean[k] = (1 - f["nu"]) * mean[k] + f["nu"] * members.mean(0)

            for image, z, label in zip(x, logits, labels, strict=True):
                p = z.softmax(0)
                bank.add(len(seen), label, float(-(p * (p + 1e-6).log()).sum()))
                seen.append(image)
            held = torch.stack([seen[position] for position, _, _ in bank.contents()])
            for model in (teacher, student, anchor):
                model.train()
            of_teacher, of_anchor = teacher(held), anchor(held)
        plain, strong = student(held), student(f["augment"](held))
        if f["loss"] == "plain":
            loss = cross_entropy(of_teacher, strong)
        else:
            both = [cross_entropy(of_teacher, own) + cross_entropy(own, of_teacher) for own in (plain, strong)]
            loss = (both[0] + both[1]) / 4
        loss = (loss + f["anchor_weight"] * cross_entropy(of_anchor, strong)).mean()
        if f["regularizer"] == "cosine":
            apart = [-(p @ p0) / (p.norm() * p0.norm()) for p, p0 in zip(params, start, strict=True)]
        else:
            apart = [((p - p0) ** 2).sum() for p, p0 in zip(params, start, strict=True)]
        loss = loss + gamma * f["lambda_0"] * sum(apart) / len(apart)  # Eq. 7
        descend(adam, loss)
        alpha = (1 - gamma) * f["alpha_0"]  # Eq. 7
        with torch.no_grad():
            for own, other in zip(teacher_layers, student_layers, strict=True):
                for name in ("weight", "bias"):
                    getattr(own, name).mul_(1 - alpha).add_(alpha * getattr(other, name))
    assert gammas[0] == 0, "before the first batch the mean features are the source's"
    assert 0.01 < gammas[-1] < 0.99, "the divergence says nothing: alpha and lambda were not tested"
    assert len({int(label) for z in outputs for label in z.argmax(1)}) > 2
    teacher_and_student = branch(teacher_layers, "teacher") | branch(student_layers, "student")
    return outputs, teacher_and_student | running(anchor_layers, "anchor") | {"mean": mean}


class BatchRenorm(nn.Module):
    """DELTA's test-time batch renormalisation, as printed; the moving statistics start with the first batch's."""

    def __init__(self, layer, alpha):
        super().__init__()
        self.weight, self.bias, self.eps, self.alpha = layer.weight, layer.bias, layer.eps, alpha
        self.mean = self.sigma = None

    def forward(self, x):
        mean, sigma = x.mean((0, 2, 3)), (x.var((0, 2, 3), unbiased=False) + self.eps).sqrt()
        if self.mean is None:
            self.mean, self.sigma = mean.detach(), sigma.detach()
        r, d = sigma.detach() / self.sigma, (mean.detach() - self.mean) / self.sigma
        self.mean = self.alpha * self.mean + (1 - self.alpha) * mean.detach()
        self.sigma = self.alpha * self.sigma + (1 - self.alpha) * sigma.detach()
        mean, sigma, r, d, weight, bias = (t[None, :, None, None] for t in (mean, sigma, r, d, self.weight, self.bias))
        return weight * ((x - mean) / sigma * r + d) + bias


def delta(net, xs, method):
    """DELTA (ICLR 2023)."""
    loss, lambda_ = method.loss, method.lambda_
    module, layers = replaced(ordinary(net)[0], lambda layer: BatchRenorm(layer, method.alpha))
    step = optimiser_of(method, [p for layer in layers for p in (layer.weight, layer.bias)])
    outputs, z, trusted = [], None, 0
    for x in xs:
        logits = module(x)
        outputs.append(logits.detach())
        classes, labels, p = logits.shape[1], logits.argmax(1).tolist(), logits.detach().softmax(1)
        z = [1 / classes] * classes if z is None else z
        frequent = [1 / z[k] for k in labels]
        terms = []
        for i, k in enumerate(labels):
            dot = frequent[i] / (sum(frequent) / len(frequent))
            if loss == "pseudo labels":
                if float(p[i].max()) > 0.4:
                    terms.append(-dot * logits[i].log_softmax(0)[k])
            elif loss == "entropy":
                terms.append(dot * entropy_of(logits[i]))
            elif (certainty := math.log(classes) / 2 - float(entropy_of(logits[i].detach()))) > 0:
                terms.append(dot * math.exp(certainty) * entropy_of(logits[i]))
        trusted += len(terms)
        if terms:
            descend(step, sum(terms) / len(terms))
        z = [lambda_ * old + (1 - lambda_) * float(new) for old, new in zip(z, p.mean(0), strict=True)]
    assert loss == "entropy" or trusted < sum(map(len, xs)), "every prediction was trusted: the choice was not tested"
    named = learned([m.weight for m in layers], [m.bias for m in layers]) | {"mean": torch.tensor(z, dtype=xs[0].dtype)}
    sigma = torch.cat([m.sigma for m in layers])[None]
    return outputs, named | {"stats.mean": torch.cat([m.mean for m in layers])[None], "stats.var": sigma**2 - 1e-5}


def sotta(net, xs, method):
    """SoTTA (NeurIPS 2023), an image at a time; with a frozen tail, the second of two layers does not learn."""
    images, frozen = torch.cat(xs), [1] if method.frozen_tail else []
    module, weights, biases = ordinary(net, net.source()[1])
    layers = [m for m in module if isinstance(m, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = method.momentum
    params = [p for i, pair in enumerate(zip(weights, biases, strict=True)) if i not in frozen for p in pair]
    adam, outputs, confident = torch.optim.Adam(params, lr=method.lr), [], 0
    bank = reference.ReservoirMemory(method.size, method.classes)

    def take_gradient():
        adam.zero_grad()
        logits = module(torch.stack([images[i] for items in bank.items for i in items]))
        torch.stack([entropy_of(z) for z in logits]).mean().backward()

    for position, image in enumerate(images):
        module.eval()
        with torch.no_grad():
            z = module(image[None])[0]
        outputs.append(z)
        if float(z.softmax(0).max()) >= method.c_0:
            lot = rng.uniform(Key(torch.tensor([0]), torch.tensor([confident])), memory.DRAWS, (2,))[0, 1]
            bank.add(position, int(z.argmax()), 0.0, float(lot))  # a coin of 0: every newcomer is held
            confident += 1
        if (position + 1) % method.every == 0 and any(bank.items):
            module.train()
            take_gradient()
            with torch.no_grad():
                length = math.sqrt(sum(float((p.grad**2).sum()) for p in params))
                away = [method.rho * p.grad / length for p in params]
                for p, step in zip(params, away, strict=True):
                    p.add_(step)
            take_gradient()
            with torch.no_grad():
                for p, step in zip(params, away, strict=True):
                    p.sub_(step)
            adam.step()
    assert method.size < confident < len(images), "all images were confident, or none: the screening was not tested"
    held = images[sorted(item for items in bank.items for item in items)].flatten(1)
    named = learned(weights, biases) | {"memory.image": held}
    for kind in ("mean", "var"):
        named[f"stats.{kind}"] = torch.cat([getattr(m, f"running_{kind}") for m in layers])[None]
    counts = {"seen": torch.tensor(len(images)), "adam.steps": torch.tensor(len(images) // method.every)}
    return torch.stack(outputs).split(len(xs[0])), named | counts


def snap(net, xs, method):
    """SNAP with TENT (NeurIPS 2025); the running statistics of the layers are those of the memory."""
    module, weights, biases = ordinary(net, net.source()[1])
    layers = [m for m in module if isinstance(m, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = 1.0
    adam = torch.optim.Adam([*weights, *biases], lr=method.lr)
    world_mean, world_var = layers[0].running_mean.clone(), layers[0].running_var.clone()
    held, outputs, steps, refused = [], [], 0, 0  # (image, class, distance), and whether it was learned from
    used = set()

    def corrected(x):
        for m in module:
            if isinstance(m, nn.BatchNorm2d):
                pixels = x[0, 0].numel()
                var = m.running_var + m.eps
                apart = x.mean((0, 2, 3)) - m.running_mean
                mean = m.running_mean + apart.sign() * (apart.abs() - method.k * (var / pixels).sqrt()).clamp_min(0)
                wider = x.var((0, 2, 3), unbiased=False) * pixels / (pixels - 1) - m.running_var
                chance = method.k * var * math.sqrt(2 / (pixels - 1))
                var = (m.running_var + wider.sign() * (wider.abs() - chance).clamp_min(0)).clamp_min(0)
                mean, var, weight, bias = (t[:, None, None] for t in (mean, var + m.eps, m.weight, m.bias))
                x = weight * (x - mean) / var.sqrt() + bias
            else:
                x = m(x)
        return x

    for number, x in enumerate(xs):
        with torch.no_grad():
            z, early = corrected(x), module[0](x)
        outputs.append(z)
        mean, var = early.mean((0, 2, 3)), early.var((0, 2, 3), unbiased=False)
        world_mean += method.momentum * (mean - world_mean)
        world_var += method.momentum * (var - world_var)
        offered = list(held)
        for image, logits, own in zip(x, z, early, strict=True):
            mean, sigma = own.mean((1, 2)), own.var((1, 2), unbiased=False).sqrt()
            distance = math.sqrt(float(((mean - world_mean) ** 2 + (sigma - world_var.sqrt()) ** 2).sum()))
            if float(logits.softmax(0).max()) > method.tau:
                offered.append((image, int(logits.argmax()), distance))
            else:
                refused += 1
        chosen = []
        for kind in (False, True):
            mine = sorted((o for o in offered if (id(o) in used) == kind), key=lambda o: o[2])
            while mine:  # the nearest image of each class that has one left
                nearest = [next(o for o in mine if o[1] == k) for k in dict.fromkeys(o[1] for o in mine)]
                chosen += nearest
                mine = [o for o in mine if not any(o is n for n in nearest)]
        kept = {id(o) for o in chosen[: method.size]}
        held = [o for o in offered if id(o) in kept]
        if number % method.learn_every == 0 and held:
            module.train()
            descend(adam, entropies(module(torch.stack([o[0] for o in held]))).mean())
            used, steps = {id(o) for o in held}, steps + 1
    assert steps > 1
    assert 0 < refused < sum(map(len, xs)) / 2, "all images were confident: the choice was not tested"
    assert len({o[1] for o in held}) > 1
    named = learned(weights, biases) | {"memory.image": torch.stack([o[0] for o in held]).flatten(1)}
    for kind in ("mean", "var"):
        named[f"stats.{kind}"] = torch.cat([getattr(m, f"running_{kind}") for m in layers])[None]
    named |= {"world.mean": world_mean[None], "world.var": world_var[None]}
    return outputs, named | {"adam.steps": torch.tensor(steps)}


def bdn(net, xs, method):
    """UniTTA's BDN (2024) at the first layer; Balanced BN is the slow loop of `reference`."""
    module, _, _ = ordinary(net, net.source()[1])
    module.requires_grad_(False)
    layers = [m for m in module if isinstance(m, nn.BatchNorm2d)]
    classes = module[-1].out_features

    def source():  # of each layer: (K, C) twice
        return [[t[None].expand(classes, -1).numpy() for t in (m.running_mean, m.running_var)] for m in layers]

    everything, known = source(), [source(), source()]

    def balanced(x, labels, counts, statistics, share):
        conventions = {"pooled_ddof": 1, "rate_cap": True, "gamma_over": "present"}
        values = x.flatten(2).numpy()
        return reference.balanced(values, labels, counts, *statistics, eta=method.eta, gamma=share, **conventions)

    def run(x, moments_of):
        for m in module:
            if isinstance(m, nn.BatchNorm2d):
                mean, var = (torch.as_tensor(t)[..., None, None] for t in moments_of(layers.index(m), x))
                x = m.weight[:, None, None] * (x - mean) / (var + m.eps).sqrt() + m.bias[:, None, None]
            else:
                x = m(x)
        return x

    def pooled(statistics):
        mean, var = (torch.as_tensor(t) for t in statistics)
        return mean.mean(0), var.mean(0) + mean.var(0)

    outputs, assigned = [], []
    for x in xs:
        labels, every = run(x, lambda i, _: pooled(everything[i])).argmax(1).tolist(), [True] * len(x)
        nearest = []

        def second(i, x, labels=labels, every=every, nearest=nearest):
            if i == 0:
                for image in x:
                    mean, sigma = image.mean((1, 2)), image.var((1, 2), unbiased=False).sqrt()
                    there = [pooled(domain[i]) for domain in known]
                    apart = [float(((mean - m) ** 2 + (sigma - v.sqrt()) ** 2).sum()) for m, v in there]
                    nearest.append(apart.index(min(apart)))
            result = balanced(x, labels, every, everything[i], method.gamma)
            everything[i] = [result.class_mean, result.class_var]
            return result.mean, result.var

        def third(i, x, labels=labels, nearest=nearest):
            means, variances = [None] * len(x), [None] * len(x)
            for d, domain in enumerate(known):
                mine = [n == d for n in nearest]
                result = balanced(x, labels, mine, domain[i], 0.0)
                domain[i] = [result.class_mean, result.class_var]
                for b in range(len(x)):
                    if mine[b]:
                        means[b], variances[b] = torch.as_tensor(result.mean), torch.as_tensor(result.var)
            return torch.stack(means), torch.stack(variances)

        before, after = run(x, second), run(x, third)
        if len(known) - 1 in nearest and len(known) < method.domains:
            known.append(source())
        surer = before.softmax(1).amax(1) >= after.softmax(1).amax(1)
        outputs.append(torch.where(surer[:, None], before, after) if method.confident else after)
        assigned.append(nearest)
    assert len({domain for batch in assigned for domain in batch}) > 1, "one domain: nothing was tested"
    assert len(known) == 3 if method.domains == 3 else len(known) > 2
    return outputs, {"known": torch.tensor(len(known))}


def batch_normalised(net):
    """The network with ordinary layers, all of which learn; BatchNorm uses each batch's own statistics."""
    module, _, _ = ordinary(net)
    return module.requires_grad_(True)


def all_parameters(net, module, prefix="", without=()):
    """The parameters of an ordinary module, as a state names them."""
    packed = WeightLayout(net, without=without).pack({n: p.detach() for n, p in module.named_parameters()})
    return {f"{prefix}{name}": t[0] for name, t in leaves(packed).items()}


def cotta(net, xs, method):
    """CoTTA (CVPR 2022) without restoring: three modules, one pass a view."""
    source, teacher, student = (batch_normalised(net) for _ in range(3))
    optimiser = torch.optim.Adam(student.parameters(), lr=method.lr)
    outputs, averaged = [], 0
    for clock, x in enumerate(xs):
        with torch.no_grad():
            if source(x).softmax(1).amax(1).mean() < method.p_th:
                averaged += 1
                keys = [Key(torch.tensor([0]), torch.tensor([clock + (i << 32)])) for i in range(method.n)]
                target = torch.stack([teacher(method.augment(x[None], key)[0]) for key in keys]).mean(0)
            else:
                target = teacher(x)
        loss = -(target.softmax(1) * student(x).log_softmax(1)).sum(1).mean()
        descend(optimiser, loss)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.mul_(method.alpha).add_(s, alpha=1 - method.alpha)
        outputs.append(target)
    assert method.p_th > 1 or 0 < averaged < len(xs), "views were averaged for all batches, or for none"
    return outputs, all_parameters(net, student, "student.") | all_parameters(net, teacher, "teacher.")


def ttac(net, xs, method):
    """TTAC (NeurIPS 2022), sample by sample where it can be."""
    module, known = batch_normalised(net), method.knowledge.tensors
    body, head = module[:-1], module[-1]
    optimiser = torch.optim.Adam(body.parameters(), lr=method.lr)
    features = known["mean"].shape[0]
    ridge = torch.eye(features, dtype=torch.float64) * known["cov"].max() / 30
    mu, cov = list(known["class_mean"]), list(known["class_cov"])
    count = [0] * len(mu)
    total, total_cov, seen = torch.zeros(features).double(), torch.zeros(features, features).double(), 0

    def gaussian(mean, covariance):
        return torch.distributions.MultivariateNormal(mean, covariance + ridge)

    def apart(p, q):
        return (torch.distributions.kl_divergence(p, q) + torch.distributions.kl_divergence(q, p)) / 2

    def update(mean, covariance, rows, rate):
        d = [row - mean for row in rows]
        delta = rate * sum(d)
        spread = sum(torch.outer(v, v) for v in d)
        return mean + delta, covariance + rate * (spread - len(d) * covariance) - torch.outer(delta, delta)

    outputs = []
    for x in xs:
        f = body(x)
        logits = head(f)
        outputs.append(logits.detach())
        p, label = logits.detach().softmax(1).max(1)
        seen += len(f)
        total, total_cov = update(total, total_cov, list(f), max(1 / seen, 1 / method.n_all))
        loss = apart(gaussian(total, total_cov), gaussian(known["mean"], known["cov"]))
        for k in range(len(mu)):
            rows = [f[i] for i in range(len(f)) if label[i] == k and p[i] > method.tau_pp]
            if not rows:
                continue
            count[k] += len(rows)
            mu[k], cov[k] = update(mu[k], cov[k], rows, max(1 / count[k], 1 / method.n_clus))
            if count[k] >= method.n_min:
                pair = gaussian(mu[k], cov[k]), gaussian(known["class_mean"][k], known["class_cov"][k])
                loss = loss + apart(*pair) / len(mu)
        descend(optimiser, loss)
        mu, cov = [t.detach() for t in mu], [t.detach() for t in cov]
        total, total_cov = total.detach(), total_cov.detach()
    assert max(count) > method.n_clus, "the memory of a class was never full"
    clusters = {"mean": torch.stack(mu), "cov": torch.stack(cov), "seen": torch.tensor(count)}
    whole = {"mean": total[None], "cov": total_cov[None]}
    named = {f"{kind}.{name}": t for kind, g in (("clusters", clusters), ("whole", whole)) for name, t in g.items()}
    return outputs, all_parameters(net, module, without=nn.Linear) | named


class Watched:
    """The network with ordinary layers, which notes what enters its BatchNorm layers."""

    def __init__(self, net):
        self.module, _, _ = ordinary(net, net.source()[1])
        self.module.requires_grad_(False)
        self.layers = [m for m in self.module if isinstance(m, nn.BatchNorm2d)]
        self.source = [(m.running_mean.clone(), m.running_var.clone()) for m in self.layers]
        self.eps = [layer.eps for layer in self.layers for _ in layer.running_mean]
        self.inputs = {}
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda m, args: self.inputs.update({m: args[0].clone()}))

    def run(self, x, statistics, share=1.0):
        """Pass images; share: of the source in the parameters, all of them here."""
        for layer, (mean, var) in zip(self.layers, statistics, strict=True):
            layer.running_mean.copy_(mean), layer.running_var.copy_(var)
        return self.module(x)

    def moments(self):
        """Raw moments of the images of the last pass, in all layers."""
        return [np.concatenate(p, 1) for p in zip(*(pixels_of(self.inputs[m]) for m in self.layers), strict=True)]

    def split(self, moments):
        """Mean and variance of each layer, from raw moments of all."""
        both = torch.from_numpy(moments[0]), torch.from_numpy(moments[1] - moments[0] ** 2)
        return list(zip(*(t.split([layer.num_features for layer in self.layers]) for t in both), strict=True))

    def surprise(self, statistics, b):
        """The negative log-likelihood of image ``b``."""
        terms = []
        for layer, (mean, var) in zip(self.layers, statistics, strict=True):
            pixels = self.inputs[layer][b].flatten(1)
            apart = pixels.var(1, unbiased=False) + layer.eps + (pixels.mean(1) - mean) ** 2
            terms.append(0.5 * ((var + layer.eps).log() + apart / (var + layer.eps)))
        return float(torch.cat(terms).mean())

    def strangeness(self, statistics):
        """The logarithm of how far each image of the last pass is from what was foreseen, over all layers."""
        terms = []
        for layer, (mean, var) in zip(self.layers, statistics, strict=True):
            pixels = self.inputs[layer].flatten(2)
            ratio = pixels.var(2, unbiased=False) + layer.eps + (pixels.mean(2) - mean) ** 2
            terms.append(ratio / (var + layer.eps))
        return [
            math.log(sum(0.5 * (r - 1 - math.log(r)) for r in row) / len(row)) for row in torch.cat(terms, 1).tolist()
        ]

    def look(self, x, logits, mixed, share, world):
        """Pass images after a change through the source, too: logits, and what was decided, if it was."""
        self.run(x, mixed, share)
        tries = [(logits, self.strangeness(mixed))]
        tries.append((self.run(x, self.source), self.strangeness(self.source)))
        by_source, latest, decided = self.moments(), world.look, None
        world.record(by_source[-latest:], tries[-1][0][-latest:].softmax(1).numpy())
        if not world.look and (decided := world.arrive(joined(mixed))):
            decision, start = decided
            if decision == "recalled":
                place = self.split(start)
                tries.append((self.run(x, place), self.strangeness(place)))
        best = [min(tries, key=lambda t, b=b: t[1][b])[0][b] for b in range(len(x))]
        return torch.stack(best), decided

    def begin(self):
        """Begin again with the source's parameters, from which nothing has moved."""

    def learn(self, number, x, teacher, statistics):
        """Learn nothing from a batch."""


class Learning(Watched):
    """The same, whose parameters learn by TRIBE's loss."""

    def __init__(self, net, method):
        super().__init__(net)
        self.method, self.anchor, self.student = method, Watched(net), Watched(net)

    def parameters(self):
        """Scales and shifts of what predicts, of the student and of the source, layer by layer."""
        every = zip(self.layers, self.student.layers, self.anchor.layers, strict=True)
        return [tuple(getattr(m, name) for m in by) for by in every for name in ("weight", "bias")]

    def begin(self):
        for _, own, source in self.parameters():
            own.requires_grad_(True).data.copy_(source)
        self.adam, self.steps = torch.optim.Adam([own for _, own, _ in self.parameters()], lr=self.method.lr), 0

    def run(self, x, statistics, share=1.0):
        for now, own, source in self.parameters():
            now.copy_((1 - share) * own.detach() + share * source)
        return super().run(x, statistics)

    def learn(self, number, x, teacher, statistics):
        apart = math.ceil(len(x) / 32)
        x, teacher = x[::apart], teacher[::apart]
        trusted = entropies(teacher) < self.method.h0 * math.log(teacher.shape[1])
        if number % self.method.learn_every or not trusted.any():
            return
        views = torch.cat((self.method.augment(x), x)[: 2 if self.method.lambda_anc else 1])
        student, *again = (logits[trusted] for logits in self.student.run(views, statistics).split(len(x)))
        loss = nn.functional.cross_entropy(student, teacher[trusted].argmax(1))
        for logits in again:
            anchored = nn.functional.mse_loss(logits, self.anchor.run(x, statistics)[trusted])
            loss = loss + self.method.lambda_anc * anchored
        descend(self.adam, loss)
        self.steps += 1


def joined(statistics):
    """Raw moments of all layers, from mean and variance of each."""
    return raw(*(torch.cat(ts).numpy() for ts in zip(*statistics, strict=True)))


def bank(net, xs, method, events=None, network=None):
    """The bank of speeds, beyond the paper: one pass, moments of each image, Balanced BN by the slow loop.

    What was decided after a change is noted in ``events``; ``network`` may learn.
    """
    network, classes, speeds = network or Watched(net), net.classes, len(method.speeds)
    layers, source, inputs = network.layers, network.source, network.inputs
    world = PlainWorld(joined(source), network.eps, method.memory, classes)

    def begin(statistics):
        """Statistics of all classes at every speed, pooled ones of the source and of every speed, and frequencies."""
        network.begin()
        known = [[[t.expand(classes, -1).numpy() for t in both] for both in statistics] for _ in method.speeds]
        return known, [source, *(list(statistics) for _ in method.speeds)], [1 / classes] * classes

    known, foreseen, frequency = begin(source)
    score, outputs, count, probes = [0.0] * (speeds + 1), [], 0, PlainProbes(classes)
    for number, x in enumerate([*xs, None]):
        powers = [math.exp((method.bonus * (v == 0) - score[v]) / method.temperature) for v in range(speeds + 1)]
        share = probes.source_share(world.distance()) if method.compare else 0
        weights = [share * (v == 0) + (1 - share) * power / sum(powers) for v, power in enumerate(powers)]
        pairs = zip(*foreseen, strict=True)  # of every layer
        mixed = [[sum(w * both[j] for w, both in zip(weights, by, strict=True)) for j in (0, 1)] for by in pairs]
        if number:
            network.learn(number - 1, xs[number - 1], outputs[-1], mixed)
        if x is None:
            break
        logits = network.run(x, mixed, share)
        observed = [b for b in range(len(x)) if (count + b) % method.observe == 0]
        each, decided, kept = method.observe, None, dict(inputs)  # each: images that an observed one stands for
        if method.compare and observed:
            surprises = network.strangeness(mixed)
            losses = [network.surprise(mixed, b) - network.surprise(source, b) for b in observed]
            world.watch([surprises[b] for b in observed], losses, len(observed) * each)
        looking = method.compare and world.look
        if looking:
            logits, decided = network.look(x, logits, mixed, share, world)
            inputs.update(kept)
        outputs.append(logits)
        if observed:
            labels, keep = logits[observed].argmax(1).tolist(), math.exp(-len(observed) * each / method.horizon)
            seldom = [min(1 / (classes * frequency[label]), 10.0) / len(observed) for label in labels]
            surprise = [
                sum(w * network.surprise(s, b) for w, b in zip(seldom, observed, strict=True)) for s in foreseen
            ]
            score = [keep * old + (1 - keep) * (new - surprise[0]) for old, new in zip(score, surprise, strict=True)]
            frequency = [keep * f + (1 - keep) * labels.count(k) / len(observed) for k, f in enumerate(frequency)]
            conventions = {"gamma": method.gamma, "pooled_ddof": 1, "rate_cap": True, "gamma_over": "present"}
            for v, eta in enumerate(method.speeds):
                for i, layer in enumerate(layers):
                    pixels, valid = inputs[layer][observed].flatten(2).numpy(), [True] * len(labels)
                    result = reference.balanced(
                        pixels, labels, valid, *known[v][i], eta=min(1, each * eta), **conventions
                    )
                    known[v][i] = [result.class_mean, result.class_var]
                    foreseen[v + 1][i] = torch.from_numpy(result.mean), torch.from_numpy(result.var)
        count += len(x)
        before, step = count - len(x), max(1, method.compare // 4)
        cycle = 8 * method.compare or 1
        due = [n % cycle in range(0, 8 * step, step) for n in range(before, count)]
        chosen = [b for b in range(len(x)) if due[b]]
        if method.compare and chosen and not looking:
            by_source = network.run(x[chosen], source).softmax(1).numpy()
            probes.add(by_source, logits[chosen].softmax(1).numpy())
            world.record(network.moments(), by_source)
        if not decided:
            continue
        decision, start = decided
        if events is not None:
            events.append(decision)
        if start is None:
            probes.images = min(probes.images, 2)
        else:
            ahead = method.bonus + 4 * method.temperature if decision == "recalled" else 0
            known, foreseen, frequency = begin(network.split(start))
            score, probes = [0.0, *[-ahead] * speeds], PlainProbes(classes)
    means = [torch.from_numpy(mean) for mean, _ in known[0]]
    named = {"stats.mean": torch.cat(means, 1), "score": torch.tensor(score, dtype=torch.float64)}
    return outputs, named | (named_places(probes, world, method.memory) if method.compare else {})


def bank_tribe(net, xs, method, events=None):
    """The bank of speeds with affine parameters that learn, now and then, by TRIBE's loss."""
    network = Learning(net, method)
    outputs, named = bank(net, xs, method, events, network)
    weights, biases = ([getattr(layer, name) for layer in network.student.layers] for name in ("weight", "bias"))
    return outputs, named | learned(weights, biases) | {"adam.steps": torch.tensor(network.steps)}


def named_places(probes, world, memory):
    """Return what a bank keeps of its stream, by the names in its state."""
    named = {
        "probes.posterior": torch.from_numpy(np.stack(probes.mean)),
        "probes.benefit": torch.tensor(probes.benefit, dtype=torch.float64),
        "probes.spread": torch.tensor(probes.spread, dtype=torch.float64),
        "world.by_source.mean": torch.from_numpy(world.by_source[:1]),
        "world.fast": torch.tensor([world.fast, world.quick], dtype=torch.float64),
        "world.classes": torch.from_numpy(np.stack((world.classes, world.new_classes))),
        "world.spread": torch.tensor(world.spread, dtype=torch.float64),
        "world.seen": torch.tensor(world.seen, dtype=torch.float64),
    }
    for i, name in enumerate(("stats", "by_source") if world.places else ()):
        means = [place[i][0] for place in world.places] + [world.source[0]] * (memory - len(world.places))
        named[f"places.{name}.mean"] = torch.from_numpy(np.stack(means))
    return named
