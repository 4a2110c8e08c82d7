"""Slow loops straight from the equations, in float64: what norm rules, memories and time filters are held against.

One stream, one layer, and no cleverness: loops over samples b, channels c, pixels l and classes k, in the paper's
words. A rule takes x (B, C, L), labels and valid (B,), the class statistics (K, C) as they stood before the batch, and
its own fields. A memory is lists of lists. A filter takes one image at a time. They share no code with the library, and
must not.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Result(NamedTuple):
    mean: Array  # (C,) what the batch is normalised with; (B, C) where every sample has its own
    var: Array  # (C,) or (B, C)
    class_mean: Array  # (K, C) what is kept
    class_var: Array  # (K, C)


def frozen(x: Array, labels: Any, valid: Any, class_mean: Array, class_var: Array) -> Result:
    return Result(class_mean[0], class_var[0], class_mean, class_var)


def batch(x: Array, labels: Any, valid: Any, class_mean: Array, class_var: Array) -> Result:
    samples, channels, pixels = x.shape
    mean, var = np.zeros(channels), np.zeros(channels)
    count = pixels * sum(bool(v) for v in valid)
    for c in range(channels):
        for b in range(samples):
            for i in range(pixels):
                mean[c] += x[b, c, i] / count if valid[b] else 0.0
        for b in range(samples):
            for i in range(pixels):
                var[c] += (x[b, c, i] - mean[c]) ** 2 / count if valid[b] else 0.0
    return Result(mean, var, class_mean, class_var)


def robust(x: Array, labels: Any, valid: Any, class_mean: Array, class_var: Array, *, alpha: float) -> Result:
    if not any(valid):
        return frozen(x, labels, valid, class_mean, class_var)
    seen = batch(x, labels, valid, class_mean, class_var)
    mean, var = class_mean.copy(), class_var.copy()
    for c in range(x.shape[1]):
        mean[0, c] = (1 - alpha) * class_mean[0, c] + alpha * seen.mean[c]
        var[0, c] = (1 - alpha) * class_var[0, c] + alpha * seen.var[c]
    return Result(mean[0], var[0], mean, var)


def balanced(
    x: Array,
    labels: Any,
    valid: Any,
    class_mean: Array,
    class_var: Array,
    *,
    eta: float,
    gamma: float,
    pooled_ddof: int,
    rate_cap: bool,
    gamma_over: str,
) -> Result:
    samples, channels, pixels = x.shape
    classes = len(class_mean)
    new_mean, new_var = np.zeros((classes, channels)), np.zeros((classes, channels))
    pooled_mean, pooled_var = np.zeros(channels), np.zeros(channels)
    members = [[b for b in range(samples) if valid[b] and labels[b] == k] for k in range(classes)]
    present = [k for k in range(classes) if members[k]]
    # The rate of class k: eta, or, released, 1 / n_k where n_k > 1 / eta.
    rate = [1 / len(m) if rate_cap and len(m) > 1 / eta else eta for m in members]
    weight = [rate[k] * len(members[k]) for k in range(classes)]  # how much sigma_k^2 is forgotten

    for c in range(channels):
        mu, sigma2 = class_mean[:, c], class_var[:, c]  # mu_k^{t-1} and sigma_k^2^{t-1}

        # Eq. 1: delta_k and the sum of squares, over the pixels of the samples of class k.
        delta, square = [0.0] * classes, [0.0] * classes
        for k in range(classes):
            for b in members[k]:
                for i in range(pixels):
                    delta[k] += rate[k] * (x[b, c, i] - mu[k]) / pixels
                    square[k] += rate[k] * (x[b, c, i] - mu[k]) ** 2 / pixels

        for k in range(classes):
            own = -(delta[k] ** 2) + square[k] - weight[k] * sigma2[k]
            if gamma_over == "all":
                # Eqs. 3 and 4, with sigma_k (not sigma_k') inside the sum over k', as printed.
                shared_mean = sum(delta[j] for j in range(classes)) / classes
                shared_var = sum(-(delta[j] ** 2) + square[j] - weight[j] * sigma2[k] for j in range(classes)) / classes
                new_mean[k, c] = mu[k] + (1 - gamma) * delta[k] + gamma * shared_mean
                new_var[k, c] = sigma2[k] + (1 - gamma) * own + gamma * shared_var
            else:
                # Released: the mean over the classes present, and the variance that shrinks is the one just updated.
                new_mean[k, c] = mu[k] + (1 - gamma) * delta[k]
                new_var[k, c] = sigma2[k] + (1 - gamma) * own
                if present:
                    forgotten = sum(weight[j] for j in present) / len(present) * new_var[k, c]
                    new_mean[k, c] += gamma * sum(delta[j] for j in present) / len(present)
                    new_var[k, c] += gamma * sum(square[j] - delta[j] ** 2 for j in present) / len(present)
                    new_var[k, c] -= gamma * forgotten

        # Eq. 2: every class counts alike. One class has no spread, whatever it would be divided by.
        pooled_mean[c] = sum(new_mean[k, c] for k in range(classes)) / classes
        for k in range(classes):
            spread = (pooled_mean[c] - new_mean[k, c]) ** 2
            pooled_var[c] += new_var[k, c] / classes + spread / max(classes - pooled_ddof, 1)
    return Result(pooled_mean, pooled_var, new_mean, new_var)


def pack(offsets: list[float], draws: list[float]) -> tuple[list[int], float]:
    """The 8-bit codes of one class's offsets in one layer, in units of each channel, and their scale."""
    scale = max(abs(offset) for offset in offsets) / 127**2
    codes = []
    for offset, draw in zip(offsets, draws, strict=True):
        below = 0
        while below < 126 and scale * (below + 1) ** 2 <= abs(offset):
            below += 1
        between = scale * (2 * below + 1)  # from this code to the next
        up = between > 0 and draw < (abs(offset) - scale * below**2) / between
        codes.append((below + up) * (1 if offset > 0 else -1))
    return codes, scale


def unpack(codes: list[int], scale: float) -> list[float]:
    return [scale * code * abs(code) for code in codes]


def instance(
    x: Array,
    labels: Any,
    valid: Any,
    class_mean: Array,
    class_var: Array,
    *,
    k: float,
    momentum: float,
    observing: bool,
    eps: float = 1e-3,
) -> Result:
    samples, channels, pixels = x.shape
    kept_mean, kept_var = class_mean.copy(), class_var.copy()
    mean, var = np.zeros((samples, channels)), np.zeros((samples, channels))

    def unbiased(values: list[float], centre: float) -> float:
        return sum((v - centre) ** 2 for v in values) / max(len(values) - 1, 1)

    def shrink(deviation: float, chance: float) -> float:
        if abs(deviation) <= chance:
            return 0.0
        return deviation - chance if deviation > 0 else deviation + chance

    for c in range(channels):
        mu_b, var_b = class_mean[0, c], class_var[0, c]
        if observing:
            batch_values = [float(v) for b in range(samples) if valid[b] for v in x[b, c]]
            mu_b = sum(batch_values) / max(len(batch_values), 1)
            var_b = unbiased(batch_values, mu_b)
            if batch_values:
                kept_mean[0, c] = (1 - momentum) * class_mean[0, c] + momentum * mu_b
                kept_var[0, c] = (1 - momentum) * class_var[0, c] + momentum * var_b
        for b in range(samples):
            mean[b, c], var[b, c] = mu_b, var_b
            if pixels > 1:
                mu_i = sum(float(v) for v in x[b, c]) / pixels
                var_i = unbiased([float(v) for v in x[b, c]], mu_i)
                mean[b, c] += shrink(mu_i - mu_b, k * ((var_b + eps) / pixels) ** 0.5)
                var[b, c] += shrink(var_i - var_b, k * (var_b + eps) * (2 / (pixels - 1)) ** 0.5)
                var[b, c] = max(var[b, c], 0.0)
    return Result(mean, var, kept_mean, kept_var)


def normalise(x: Array, mean: Array, var: Array, weight: Array, bias: Array, eps: float) -> Array:
    out = np.zeros_like(x)
    mean, var = np.broadcast_to(mean, x.shape[:2]), np.broadcast_to(var, x.shape[:2])
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            for i in range(x.shape[2]):
                out[b, c, i] = weight[c] * (x[b, c, i] - mean[b, c]) / (var[b, c] + eps) ** 0.5 + bias[c]
    return out


RULES: dict[str, Callable[..., Result]] = {
    "frozen": frozen,
    "batch": batch,
    "robust": robust,
    "balanced": balanced,
    "instance": instance,
}


# -- memories -------------------------------------------------------------------------------------------------------


class Item:
    """One image in RoTTA's memory, known by its position in the stream."""

    def __init__(self, position: int, uncertainty: float) -> None:
        self.position, self.uncertainty, self.age = position, uncertainty, 0


class TimelyMemory:
    """RoTTA: a list of items for each class; everybody ages with every arrival."""

    def __init__(self, size: int, classes: int) -> None:
        self.size, self.classes = size, classes
        self.items: list[list[Item]] = [[] for _ in range(classes)]

    def score(self, item: Item) -> float:
        return 1 / (1 + math.exp(-item.age / self.size)) + item.uncertainty / math.log(self.classes)

    def add(self, position: int, label: int, uncertainty: float) -> None:
        newcomer = Item(position, uncertainty)
        if self.has_place_for(newcomer, label):
            self.items[label].append(newcomer)
        for items in self.items:
            for item in items:
                item.age += 1

    def has_place_for(self, newcomer: Item, label: int) -> bool:
        counts = [len(items) for items in self.items]
        if counts[label] < self.size / self.classes:
            if sum(counts) < self.size:
                return True
            candidates = [item for items in self.items if len(items) == max(counts) for item in items]
        else:
            candidates = list(self.items[label])
        leaver = candidates[0]
        for item in sorted(candidates, key=lambda item: item.position):
            if self.score(item) >= self.score(leaver):
                leaver = item
        if not self.score(leaver) > self.score(newcomer):
            return False
        for items in self.items:
            if leaver in items:
                items.remove(leaver)
        return True

    def contents(self) -> list[tuple[int, int, int]]:
        """(position, label, age), in order of arrival."""
        return sorted((item.position, k, item.age) for k, items in enumerate(self.items) for item in items)


class ReservoirMemory:
    """NOTE: a list of positions for each class; ``coin`` and ``lot`` in [0, 1) are the draws of an arrival."""

    def __init__(self, size: int, classes: int) -> None:
        self.size = size
        self.items: list[list[int]] = [[] for _ in range(classes)]
        self.predicted = [0] * classes

    def add(self, position: int, label: int, coin: float, lot: float) -> None:
        self.predicted[label] += 1
        counts = [len(items) for items in self.items]
        if sum(counts) >= self.size:
            largest = [k for k, count in enumerate(counts) if count == max(counts)]
            if label in largest:
                if coin > counts[label] / self.predicted[label]:
                    return
                largest = [label]
            candidates = sorted(item for k in largest for item in self.items[k])
            leaver = candidates[int(lot * len(candidates))]
            for items in self.items:
                if leaver in items:
                    items.remove(leaver)
        self.items[label].append(position)

    def contents(self) -> list[tuple[int, int]]:
        """(position, label), in order of arrival."""
        return sorted((position, k) for k, items in enumerate(self.items) for position in items)


# -- time filters ---------------------------------------------------------------------------------------------------


def softmax(z: list[float]) -> list[float]:
    weights = [math.exp(v - max(z)) for v in z]
    return [w / sum(weights) for w in weights]


class Chain:
    """The hidden Markov model of docs/time.md at one temperature T."""

    least_confidence = 0.25  # of many classes; a tenth with ten of them

    def __init__(self, temperature: float, classes: int, fields: Any) -> None:
        self.temperature, self.classes, self.fields = temperature, classes, fields
        self.belief = [1 / classes] * classes  # p
        self.marginal = [1 / classes] * classes  # pi
        self.weight = 0.5  # w, of the marginal in the null model; the rest is even draws
        self.rate = 0.5  # rho
        self.recent, self.evidence, self.images = 0.0, -fields.evidence_on, 0
        self.confidence = 1.0  # the mean of the largest likelihood

    def has_a_say(self) -> bool:
        return self.confidence >= self.least_confidence - 1.5 / self.classes

    def likelihood(self, z: list[float]) -> list[float]:
        """l: softmax(z / T), of which a share is spread over all classes."""
        floor = self.fields.likelihood_floor
        return [(1 - floor) * v + floor / self.classes for v in softmax([v / self.temperature for v in z])]

    def add(self, z: list[float]) -> None:
        f, classes = self.fields, range(self.classes)
        chance = self.likelihood(z)
        prior = [(1 - self.rate) * self.belief[k] + self.rate / self.classes for k in classes]
        total = sum(prior[k] * chance[k] for k in classes)  # prior . l
        local = sum(self.marginal[k] * chance[k] for k in classes)  # pi . l
        even = sum(chance[k] / self.classes for k in classes)
        null = self.weight * local + (1 - self.weight) * even
        self.weight = 0.99 * (self.weight * local / null) + 0.01 * 0.5

        # rho: the probability that the class was drawn anew. l sums to 1, so that of drawing and seeing is rho / K.
        anew = sum(self.rate / self.classes * chance[k] for k in classes) / total
        step = max(1 / (self.images + 30), f.rate_step)
        rate = (1 - step) * self.rate + step * anew

        # pi: the probability of each class if the image was drawn from pi, and a hundredth for every class alike.
        step = max(1 / (self.images + 10), f.marginal_step)
        for k, drawn in enumerate([self.marginal[k] * chance[k] / local for k in classes]):
            self.marginal[k] = (1 - step) * self.marginal[k] + step * (0.99 * drawn + 0.01 / self.classes)

        gained = math.log(total) - math.log(null)
        self.recent = f.recent_memory * self.recent + math.log(total) - math.log(even)
        self.evidence = min(max(self.evidence + gained - f.evidence_drift, -f.evidence_on), f.evidence_most)
        self.belief = [prior[k] * chance[k] / total for k in classes]
        self.rate = min(max(rate, f.least_rate), 1.0)
        step = max(1 / (self.images + 2), f.marginal_step)
        self.confidence = (1 - step) * self.confidence + step * max(chance)
        if not self.has_a_say():  # it starts again
            self.belief, self.rate, self.evidence = [1 / self.classes] * self.classes, 0.5, -f.evidence_on
        self.images += 1


class MarkovFilter:
    """A bank of chains; ``fields`` has the names of `tribe.filters.markov.Markov`."""

    def __init__(self, classes: int, fields: Any) -> None:
        self.fields, self.chains = fields, [Chain(t, classes, fields) for t in fields.temperatures]

    def on(self) -> bool:
        return any(chain.evidence > self.fields.evidence_on for chain in self.chains)

    def chosen(self) -> Chain:
        """The sharpest of the chains with a say that predicted the last images about best."""
        chains = [chain for chain in self.chains if chain.has_a_say()] or self.chains[:1]
        best = max(chain.recent for chain in chains)
        near = best - self.fields.temperature_margin * abs(best)
        return next(chain for chain in chains if chain.recent >= near)

    def add(self, batch: list[list[float]], counts: list[bool]) -> list[list[float] | None]:
        """The answer to each image of a batch: probabilities, or None where the method's own prediction stays."""
        shares = self.fields.training_shares or [1.0] * len(batch[0])
        seen = [i for i, z in enumerate(batch) if counts[i] and len(set(z)) > 1]
        images = {i: [v - math.log(s) for v, s in zip(batch[i], shares, strict=True)] for i in seen}
        answers: list[list[float] | None] = [None] * len(batch)
        history: dict[int, list[tuple[float, list[float]]]] = {}  # of each chain: rho before and p after each image
        said: dict[int, list[bool]] = {}  # of each chain: whether it had a say after each image
        for i in seen:
            for chain in self.chains:
                before = chain.rate
                chain.add(images[i])
                history.setdefault(id(chain), []).append((before, chain.belief))
                said.setdefault(id(chain), []).append(chain.has_a_say())
            if self.on():
                answers[i] = self.chosen().belief
        if self.fields.within == "past" or not seen:
            return answers
        chain, on = self.chosen(), self.on()
        smoothed = self.backward(chain, [images[i] for i in seen], history[id(chain)])
        for i, answer, had_a_say in zip(seen, smoothed, said[id(chain)], strict=True):
            answers[i] = answer if on and had_a_say else None
        return answers

    def backward(
        self, chain: Chain, images: list[list[float]], history: list[tuple[float, list[float]]]
    ) -> list[list[float]]:
        """p of each image given its whole batch: p times the probability of all later images, given its class."""
        classes, smoothed = range(chain.classes), []
        for i in range(len(images)):
            ahead = [1.0] * chain.classes  # the probability of the images after the i-th, for each class of the i-th
            for j in reversed(range(i + 1, len(images))):
                rate, chance = history[j][0], chain.likelihood(images[j])
                other = sum(chance[k] * ahead[k] for k in classes) / chain.classes
                ahead = [(1 - rate) * chance[k] * ahead[k] + rate * other for k in classes]
            product = [history[i][1][k] * ahead[k] for k in classes]
            smoothed.append([v / sum(product) for v in product])
        return smoothed


class CofaFilter:
    """COFA: average with the image before; keep the average if its largest probability is larger."""

    def __init__(self) -> None:
        self.last: list[float] | None = None

    def add(self, z: list[float], counts: bool) -> list[float] | None:
        """Probabilities, or None where the method's own prediction stays."""
        if not counts or len(set(z)) == 1:
            return None
        answer = None
        if self.last is not None:
            average = softmax([(a + b) / 2 for a, b in zip(z, self.last, strict=True)])
            answer = average if max(average) > max(softmax(z)) else None
        self.last = z
        return answer
