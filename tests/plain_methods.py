"""Methods as plain PyTorch loops, from the equations of their papers: ordinary layers, backward() and torch.optim.

One stream, one image after another where that is clearer. They share no code with the library but the network that
`Backbone.plain` makes of ordinary layers; random draws are arguments.
"""

import copy
import math

import torch
from torch import nn

import reference


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


def deyo(net, xs, orders, *, tau_ent, tau_plpd, ent_0, patches, frozen=(), optimiser):
    """DeYO (ICLR 2024); ``orders`` are the places of the patches of every image, ``frozen`` layers do not learn.

    Returns the logits of each batch, the scales and shifts, and how many images each batch taught.
    """
    module, weights, biases = ordinary(net)
    learning = [p for i, pair in enumerate(zip(weights, biases, strict=True)) if i not in frozen for p in pair]
    step, outputs, taught = optimiser(learning), [], []
    for x, order in zip(xs, orders, strict=True):
        logits = module(x)
        outputs.append(logits.detach())
        unit = math.log(logits.shape[1])
        low = [i for i in range(len(x)) if float(entropy_of(logits[i].detach())) < tau_ent * unit]
        terms = []
        if low:
            with torch.no_grad():
                others = module(torch.stack([in_pieces(x[i], patches, order[i]) for i in low]))
            for i, other in zip(low, others, strict=True):
                entropy, label = entropy_of(logits[i]), int(logits[i].argmax())
                plpd = float(logits[i].softmax(0)[label].detach() - other.softmax(0)[label])
                if plpd > tau_plpd:
                    weight = 1 / math.exp(float(entropy.detach()) - ent_0 * unit) + 1 / math.exp(-plpd)
                    terms.append(weight * entropy)
        taught.append(len(terms))
        if terms:
            step.zero_grad()
            (sum(terms) / len(terms)).backward()
            step.step()
    return outputs, weights, biases, taught


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


def robust(net, share):
    """The network, a Sequential, with Robust BN in place of BatchNorm, and its normalisation layers."""
    module, _, _ = ordinary(net, net.source()[1])
    for i, layer in enumerate(module):
        if isinstance(layer, nn.BatchNorm2d):
            module[i] = RobustNorm(layer, share)
    return module, [layer for layer in module if isinstance(layer, RobustNorm)]


def features_by_class(net, xs, classes):
    """PeTTA's source knowledge: mean and variance of the features of the images predicted as each class."""
    module, _, _ = ordinary(net, net.source()[1])
    features = torch.cat([module[:-1](x).detach() for x in xs])
    labels = module[-1](features).argmax(1)
    enough = [k if int((labels == k).sum()) >= 2 else None for k in range(classes)]
    groups = [features if k is None else features[labels == k] for k in enough]
    return torch.stack([g.mean(0) for g in groups]), torch.stack([g.T.cov().diagonal() for g in groups])


def petta(net, xs, source_mean, source_var, f):
    """PeTTA (NeurIPS 2024) with the fields ``f``, a mapping; ``f["augment"]`` is a function without randomness.

    Returns the logits of each batch, the layers of teacher, student and anchor, the mean features, and each gamma.
    """

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
        adam.zero_grad()
        loss.backward()
        adam.step()
        alpha = (1 - gamma) * f["alpha_0"]  # Eq. 7
        with torch.no_grad():
            for own, other in zip(teacher_layers, student_layers, strict=True):
                for name in ("weight", "bias"):
                    getattr(own, name).mul_(1 - alpha).add_(alpha * getattr(other, name))
    return outputs, (teacher_layers, student_layers, anchor_layers), mean, gammas


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


def delta(net, xs, *, alpha, lambda_, loss, optimiser):
    """DELTA (ICLR 2023). Returns the logits of each batch, the normalisation layers, and z."""
    module, _, _ = ordinary(net)
    for i, layer in enumerate(module):
        if isinstance(layer, nn.BatchNorm2d):
            module[i] = BatchRenorm(layer, alpha)
    layers = [layer for layer in module if isinstance(layer, BatchRenorm)]
    step, outputs, z = optimiser([p for layer in layers for p in (layer.weight, layer.bias)]), [], None
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
        if terms:
            step.zero_grad()
            (sum(terms) / len(terms)).backward()
            step.step()
        z = [lambda_ * old + (1 - lambda_) * float(new) for old, new in zip(z, p.mean(0), strict=True)]
    return outputs, layers, z


def sotta(net, images, *, c_0, rho, momentum, lr, size, every, lots, frozen=()):
    """SoTTA (NeurIPS 2023), an image at a time; ``lots`` are the draws of the confident ones, in order.

    Returns the logits of each image, the BatchNorm layers, and the positions in memory.
    """
    module, weights, biases = ordinary(net, net.source()[1])
    layers = [m for m in module if isinstance(m, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = momentum
    params = [p for i, pair in enumerate(zip(weights, biases, strict=True)) if i not in frozen for p in pair]
    adam, lots, outputs, bank = torch.optim.Adam(params, lr=lr), iter(lots), [], None

    def descend():
        adam.zero_grad()
        logits = module(torch.stack([images[i] for items in bank.items for i in items]))
        torch.stack([entropy_of(z) for z in logits]).mean().backward()

    for position, image in enumerate(images):
        module.eval()
        with torch.no_grad():
            z = module(image[None])[0]
        outputs.append(z)
        bank = bank or reference.ReservoirMemory(size, len(z))
        if float(z.softmax(0).max()) >= c_0:
            bank.add(position, int(z.argmax()), 0.0, next(lots))  # a coin of 0: every newcomer is held
        if (position + 1) % every == 0 and any(bank.items):
            module.train()
            descend()
            with torch.no_grad():
                length = math.sqrt(sum(float((p.grad**2).sum()) for p in params))
                away = [rho * p.grad / length for p in params]
                for p, step in zip(params, away, strict=True):
                    p.add_(step)
            descend()
            with torch.no_grad():
                for p, step in zip(params, away, strict=True):
                    p.sub_(step)
            adam.step()
    return torch.stack(outputs), layers, sorted(item for items in bank.items for item in items)


def bdn(net, xs, *, eta, gamma, layer, domains, confident=True):
    """UniTTA's BDN (2024); Balanced BN is the slow loop of `reference`. ``layer`` counts BatchNorm layers.

    Returns the logits of each batch, the domain of each image, and how many domains are known, the next one included.
    """
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
        return reference.balanced(values, labels, counts, *statistics, eta=eta, gamma=share, **conventions)

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
            if i == layer:
                for image in x:
                    mean, sigma = image.mean((1, 2)), image.var((1, 2), unbiased=False).sqrt()
                    there = [pooled(domain[i]) for domain in known]
                    apart = [float(((mean - m) ** 2 + (sigma - v.sqrt()) ** 2).sum()) for m, v in there]
                    nearest.append(apart.index(min(apart)))
            result = balanced(x, labels, every, everything[i], gamma)
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
        if len(known) - 1 in nearest and len(known) < domains:
            known.append(source())
        surer = before.softmax(1).amax(1) >= after.softmax(1).amax(1)
        outputs.append(torch.where(surer[:, None], before, after) if confident else after)
        assigned.append(nearest)
    return outputs, assigned, len(known)
