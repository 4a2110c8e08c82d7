"""Plain loops over numbers for what a bank of speeds keeps of its stream: probes, the world, places.

A mean and a variance are a pair of raw moments here, E[x] and E[x^2], whose averages are plain averages.
"""

import math

import numpy as np

from tribe.methods import places, probing


def raw(means, variances):
    """Raw moments (2, C)."""
    return np.stack((means, variances + np.square(means)))


def pixels_of(inputs):
    """Raw moments of the pixels of each image (B, C, H, W), a list of (2, C)."""
    return [np.stack((x.flatten(1).mean(1).numpy(), (x.flatten(1) ** 2).mean(1).numpy())) for x in inputs]


def mix(old, new, rate):
    return (1 - rate) * old + rate * new


def says(p, mean):
    """The divergence of a prediction from the average one."""
    return sum(float(a) * math.log(max(a, 1e-9) / max(b, 1e-9)) for a, b in zip(p, mean, strict=True))


def apart(of, other, eps):
    """The Kullback-Leibler divergence of Gaussians, channel by channel, and its mean."""
    total = 0.0
    for (mean, square), (mean2, square2), e in zip(of.T, other.T, eps, strict=True):
        var, var2 = square - mean**2 + e, square2 - mean2**2 + e
        total += 0.5 * (math.log(var2 / var) + (var + (mean - mean2) ** 2) / var2 - 1)
    return total / len(eps)


class PlainProbes:
    """Predictions of the source (0) and of the adapted network (1), averaged over the images that passed both."""

    def __init__(self, classes):
        self.mean, self.benefit = [np.full(classes, 1 / classes)] * 2, 0.0
        self.spread, self.images = probing.SPREAD, 0.0

    def source_share(self, distance):
        middle, half = (probing.NEAR + probing.FAR) / 2, (probing.FAR - probing.NEAR) / 2
        side = max(-1, min(1, (distance - middle) / half))
        known = self.benefit * self.images / (self.images + probing.FIRST)
        known += side * probing.DEVIATIONS * math.sqrt(self.spread / (self.images + 4))
        return 1 / (1 + math.exp((known - probing.MARGIN * (1 - side)) / probing.SCALE))

    def add(self, source, adapted):
        """Average the probabilities of images by both networks, then what each image says beside the average."""
        count = len(source)
        rate = min(1, max(count / probing.MEMORY, count / (self.images + count + probing.FIRST)))
        self.mean = [mix(mean, sum(by) / count, rate) for mean, by in zip(self.mean, (source, adapted), strict=True)]
        gains = [says(q, self.mean[1]) - says(p, self.mean[0]) for p, q in zip(source, adapted, strict=True)]
        gains = [max(-probing.MOST, min(probing.MOST, gain)) for gain in gains]
        self.spread = mix(self.spread, sum((gain - self.benefit) ** 2 for gain in gains) / count, rate)
        self.benefit = mix(self.benefit, sum(gains) / count, rate)
        self.images = min(self.images + count, probing.MEMORY)


class PlainWorld:
    """The world that a stream is in, and the places where it was."""

    def __init__(self, source, eps, room):
        self.source, self.eps, self.room = source, eps, room
        self.fast = self.slow = 0.0
        self.spread, self.age, self.look = 1.0, 0, 0
        self.by_source, self.seen, self.new, self.places = source, 0, None, []

    def distance(self):
        return apart(self.by_source, self.source, self.eps)

    def watch(self, surprises, count):
        """Follow the surprise of some of ``count`` images; notice a change."""
        now = sum(surprises) / len(surprises)
        known = places.LOOK - self.look if self.look else self.age

        def rate(horizon):
            return max(1 - math.exp(-count / horizon), count / (known + count))

        self.fast = mix(self.fast, now, rate(places.FAST))
        above = self.fast - self.slow if self.age else 0.0
        much = places.STEP * math.sqrt(self.spread)
        changed = not self.look and self.age >= places.LEAST_AGE and above > much
        self.slow = now if changed else mix(self.slow, now, rate(places.SLOW))
        squares = [min((surprise - self.slow) ** 2, 4 * self.spread) for surprise in surprises]
        self.spread = max(mix(self.spread, sum(squares) / len(squares), rate(places.USUAL)), places.LEAST_SPREAD)
        self.age, self.look = self.age + count, int(places.LOOK) if changed else self.look

    def record(self, passed):
        """Follow the raw moments of images that passed the source."""
        now, count = sum(passed) / len(passed), len(passed)
        if self.look:
            done = int(places.LOOK) - self.look
            self.new = now if not done else mix(self.new, now, max(count / (done + count), count / places.SEEN))
            self.look -= count
        else:
            self.by_source = mix(self.by_source, now, min(1, max(count / (self.seen + count), count / places.SEEN)))
            self.seen = min(self.seen + count, places.SEEN)

    def arrive(self, current):
        """Decide where the stream is, and remember the place that it left, where ``current`` normalised."""
        here, clean = (apart(self.new, other, self.eps) for other in (self.by_source, self.source))
        there = [apart(self.new, place, self.eps) for _, place in self.places]
        decision = "stay", None
        if there and min(there) < places.NEARER * min(here, clean):
            decision = "recalled", self.places[there.index(min(there))][0]
        elif clean < places.BACK * here:
            decision = "back", self.source
        if self.age >= places.STAY + places.LOOK and self.room:
            left = [apart(self.by_source, place, self.eps) for _, place in self.places]
            if left and (min(left) < places.SAME or len(left) == self.room):
                self.places[left.index(min(left))] = current, self.by_source
            else:
                self.places.append((current, self.by_source))
        self.by_source, self.seen, self.age = self.new, places.FEW, int(places.LOOK)
        return decision
