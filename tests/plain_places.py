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

    def __init__(self, source, eps, room, classes):
        self.source, self.eps, self.room = source, eps, room
        self.fast = self.slow = self.quick = self.usual = 0.0
        self.spread, self.age, self.look, self.lost = 1.0, 0, 0, False
        self.by_source, self.seen, self.new, self.places = source, 0, None, []
        self.classes = self.new_classes = np.full(classes, 1 / classes)

    def distance(self):
        return self.far(self.by_source, self.classes)

    def far(self, moments, classes):
        """The divergence from the source, of which a part is due to few classes."""
        whole, others = apart(moments, self.source, self.eps), 1 / sum(p * p for p in classes) - 1
        return whole - (1 - min(1, others / places.MANY)) * min(whole, places.OF_CLASS)

    def watch(self, surprises, losses, count):
        """Follow the surprise of some of ``count`` images, and what adapting foresees less; notice a change."""
        now, loss = (sum(values) / len(values) for values in (surprises, losses))
        each = count / len(surprises)
        ages = [math.exp(-each * i / places.FAST) for i in reversed(range(len(surprises)))]
        latest, late_loss = (
            sum(w * value for w, value in zip(ages, values, strict=True)) / sum(ages) for values in (surprises, losses)
        )
        known = places.LOOK - self.look if self.look else self.age

        def rate(horizon):
            return max(1 - math.exp(-count / horizon), count / (known + count))

        usual = min(self.usual, self.quick)
        self.fast = mix(self.fast, latest, rate(places.FAST))
        self.quick = mix(self.quick, late_loss, rate(places.FAST))
        free = self.age >= places.LEAST_AGE and not self.look
        changed = free and self.fast - self.slow > places.STEP * math.sqrt(self.spread)
        lost = free and self.quick - usual > max(places.LOST * abs(usual), places.LEAST_LOST)
        self.slow = now if changed else mix(self.slow, now, rate(places.SLOW))
        self.usual = loss if lost else mix(self.usual, loss, rate(places.LOST_SLOW))
        squares = [min((surprise - self.slow) ** 2, 4 * self.spread) for surprise in surprises]
        self.spread = max(mix(self.spread, sum(squares) / len(squares), rate(places.USUAL)), places.LEAST_SPREAD)
        self.age, self.look = self.age + count, int(places.LOOK) if changed or lost else self.look
        self.lost = not changed if changed or lost else self.lost

    def record(self, passed, predicted):
        """Follow the raw moments of images that passed the source, and its predictions."""
        now, classes, count = sum(passed) / len(passed), sum(predicted) / len(predicted), len(passed)
        if self.look:
            done = int(places.LOOK) - self.look
            rate = max(count / (done + count), count / places.SEEN)
            self.new = now if not done else mix(self.new, now, rate)
            self.new_classes = mix(self.new_classes, classes, rate)
            self.look -= count
        else:
            rate = min(1, max(count / (self.seen + count), count / places.SEEN))
            self.by_source, self.classes = mix(self.by_source, now, rate), mix(self.classes, classes, rate)
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
        near = self.far(self.new, self.new_classes) < places.BACK_NEAR
        if self.lost and decision[0] != "back" and not near:
            return None
        if self.age >= places.STAY + places.LOOK and self.room:
            left = [apart(self.by_source, place, self.eps) for _, place in self.places]
            if left and (min(left) < places.SAME or len(left) == self.room):
                self.places[left.index(min(left))] = current, self.by_source
            else:
                self.places.append((current, self.by_source))
        self.by_source, self.seen, self.age = self.new, places.FEW, int(places.LOOK)
        self.classes = self.new_classes
        return decision
