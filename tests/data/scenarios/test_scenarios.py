"""Streams: equal to the released samplers index by index, and distributed as the paper's model says."""

import hashlib
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from places import DATA
from tribe import scenarios
from tribe.data.scenarios import Dirichlet, LongTail, Natural, RealWorld, Schedule, Shuffled
from tribe.data.scenarios.sampling import ClassPool, drain, log_dirichlet
from tribe.testing import SCENARIO_CHECKS, check_scenario

SMALL = DATA / "streams.npz"

RECORDED = {
    "cifar10_gli-f_if100_seed425": ("gli-f", {"imbalance": 100}),
    "cifar10_gli-v_if100_seed425": ("gli-v", {"imbalance": 100}),
    "cifar100_gli-f_if200_seed425": ("gli-f", {"imbalance": 200}),
    "cifar10_ptta_seed425": ("ptta", {}),
    "mnist_gli-f_if10_seed425": ("gli-f", {"imbalance": 10}),
    "mnist_gli-v_if100_seed425": ("gli-v", {"imbalance": 100}),
    "synthetic1000_ptta_seed425": ("ptta", {}),
    "synthetic1000_gli-f_if10_seed425": ("gli-f", {"imbalance": 10}),
}
empty_classes = pytest.mark.filterwarnings("ignore:an imbalance of")


def official(name):
    """The labels of a test set, in file order."""
    return torch.from_numpy(np.load(SMALL)[f"labels/{name}"].astype(np.int64))


def even(domains=2, classes=10, per_class=100):
    """Labels of a balanced data set, in a file order of its own for each domain."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randperm(classes * per_class, generator=generator) % classes for _ in range(domains)]


def digest_of_index(index):
    return hashlib.blake2b(index.numpy().astype("<i4").tobytes(), digest_size=16).hexdigest()


# -- the released samplers ---------------------------------------------------------------------------------------------


def replayed(recording):
    name, fields = RECORDED[recording]
    return scenarios.create(name, **fields).schedule([official(recording.split("_")[0])] * 15, seed=425)


@empty_classes
@pytest.mark.parametrize("recording", RECORDED)
def test_streams_equal_the_recorded_ones(recording):
    small, stream = np.load(SMALL), replayed(recording)
    assert torch.bincount(stream.domain).tolist() == small[f"length/{recording}"].tolist()
    assert digest_of_index(stream.index) == str(small[f"digest/{recording}"])
    assert bool((stream.domain.diff() >= 0).all())
    assert not stream.reset.any()


def slow_slots(members, sigma, rng):
    """The released local draw as its description reads: cut each class, play slot by slot, empty parts included."""
    classes = len(members)
    q = rng.dirichlet([sigma] * min(classes, 100), size=classes)
    cut = [np.split(m, (np.cumsum(row)[:-1] * len(m)).astype(int)) for m, row in zip(members, q, strict=True)]
    return np.concatenate([cut[k][slot] for slot in range(q.shape[1]) for k in rng.permutation(classes)])


@pytest.mark.parametrize("sizes", [[5, 0, 3], [1], [40, 7, 1, 0, 300], [2] * 130])
@pytest.mark.parametrize("sigma", [0.05, 1.0, 30.0])
def test_slots_equal_the_slow_loop(sizes, sigma):
    members = np.split(np.random.RandomState(1).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    fast = Dirichlet(sigma).arrange(ClassPool(members, np.ones(len(sizes))), "released", np.random.RandomState(7))
    assert np.array_equal(fast, slow_slots(members, sigma, np.random.RandomState(7)))


def test_ptta_is_not_a_long_tail_of_one():
    labels = [official("mnist")]
    assert len(scenarios.create("ptta").schedule(labels, 0).index) == 10_000
    tail = scenarios.create("gli-f", imbalance=1).schedule(labels, 0)
    assert len(tail.index) == np.minimum(np.bincount(labels[0]), 1000).sum()


def test_names_are_cases_of_the_hierarchical_model():
    labels = even(3)
    for name, profile, local in [
        ("continual", Natural(), Shuffled()),
        ("ptta", Natural(), Dirichlet(0.1)),
        ("gli-f", LongTail(100), Dirichlet(0.1)),
        ("gli-v", LongTail(100, varying=True), Dirichlet(0.1)),
    ]:
        for draw in ("released", "paper"):
            case = RealWorld(profile=profile, local=local, draw=draw)
            named = scenarios.create(name, draw=draw)
            assert scenarios.digest(named.schedule(labels, 4)) == scenarios.digest(case.schedule(labels, 4))


# -- the paper's generative draw ---------------------------------------------------------------------------------------


def first_windows(share, sigma, window, windows, seeds, per_class):
    """(seeds x windows, window) labels of windows before any class can be exhausted."""
    members = list(np.arange(len(share) * per_class).reshape(len(share), per_class))
    assert window * windows <= per_class
    rows = []
    for seed in range(seeds):
        pool = ClassPool(members, np.array(share))
        played = Dirichlet(sigma, window).arrange(pool, "paper", np.random.RandomState(seed))
        rows.append(played[: window * windows].reshape(windows, window) // per_class)
    return np.concatenate(rows)


@pytest.mark.parametrize(("share", "sigma"), [([1.0] * 4, 1.0), (LongTail(10).share(5, "paper"), 0.5)])
def test_windows_are_dirichlet_multinomial(share, sigma):
    window = 16
    labels = first_windows(share, sigma, window, windows=60, seeds=40, per_class=1000)
    alpha = sigma * np.array(share)
    total = alpha.sum()
    p = alpha / total
    counts = np.stack([(labels == k).sum(1) for k in range(len(alpha))], 1)  # (N, K)
    spread = window * p * (1 - p) * (window + total) / (1 + total)
    assert np.all(np.abs(counts.mean(0) - window * p) < 4.5 * np.sqrt(spread / len(counts)))
    assert np.allclose(counts.var(0), spread, rtol=0.12)
    together = (alpha * (alpha + 1)).sum() / (total * (total + 1))  # two samples of a window share their class
    assert (labels[:, 0] == labels[:, 1]).mean() == pytest.approx(together, abs=0.045)
    assert (labels[:, 0] == labels[:, -1]).mean() == pytest.approx(together, abs=0.045)
    assert (labels[:-1, -1] == labels[1:, 0]).mean() == pytest.approx((p**2).sum(), abs=0.045)  # of two windows


def test_dirichlet_by_logarithms_is_dirichlet():
    rng = np.random.RandomState(0)
    draws = np.stack([log_dirichlet(np.array([0.5, 2.0, 1.5]), rng) for _ in range(4000)])
    q = np.exp(draws) / np.exp(draws).sum(1, keepdims=True)
    for k, a in enumerate([0.5, 2.0, 1.5]):
        assert stats.kstest(q[:, k], stats.beta(a, 4.0 - a).cdf).pvalue > 0.001


def test_a_tiny_concentration_stays_finite():
    alpha = 1e-4 * LongTail(100).share(10, "paper")
    draws = np.stack([log_dirichlet(alpha, np.random.RandomState(seed)) for seed in range(3000)])
    assert np.isfinite(draws).all()
    winners = np.bincount(draws.argmax(1), minlength=10)  # all mass on one class, which is drawn by share
    assert stats.chisquare(winners, 3000 * alpha / alpha.sum()).pvalue > 0.001
    stream = scenarios.create("gli-f", draw="paper", sigma=1e-6).schedule(even(1), 0)
    assert len(stream.index) == LongTail(100).counts(10, 1000, "paper").sum()


def test_what_is_exhausted_drops_out():
    rng, seen = np.random.RandomState(0), {}
    for _ in range(6000):
        order = tuple(drain(np.log([0.7, 0.3]), np.array([1, 2]), 3, rng).tolist())
        seen[order] = seen.get(order, 0) + 1
    expected = {(0, 1, 1): 0.7, (1, 0, 1): 0.3 * 0.7, (1, 1, 0): 0.3 * 0.3}
    assert seen.keys() == expected.keys()
    assert stats.chisquare([seen[k] for k in expected], [6000 * p for p in expected.values()]).pvalue > 0.001


def test_paper_counts_and_order_within_a_class():
    labels = even(1, per_class=200)
    stream = scenarios.create("gli-f", draw="paper", imbalance=50).schedule(labels, 1)
    counts = scenarios.class_counts(stream, labels)[0].tolist()
    assert counts == [int(200 * (1 / 50) ** (k / 10)) for k in range(10)]
    first = stream.index[labels[0][stream.index] == 0]
    assert not bool((first.diff() > 0).all())  # not in file order


@pytest.mark.parametrize("draw", ["released", "paper"])
def test_a_smaller_sigma_is_locally_less_balanced(draw):
    labels = even(1, per_class=400)
    balance = [
        scenarios.local_balance(scenarios.create("ptta", sigma=sigma, draw=draw).schedule(labels, 0), labels).mean()
        for sigma in (0.01, 0.1, 1.0, 100.0)
    ]
    assert balance == sorted(balance)


# -- the table of protocols --------------------------------------------------------------------------------------------


def measured(name, draw):
    """Stationary domain, balanced local class distribution, global class distribution: as a stream shows them."""
    labels = [official("cifar10")[:5000]] * 6
    stream = scenarios.create(name, draw=draw).schedule(labels, 11)
    stretch = stream.reset.long().cumsum(0)
    stationary = all(len(stream.domain[stretch == s].unique()) == 1 for s in stretch.unique())
    locally = float(scenarios.local_balance(stream, labels).mean())
    assert not 0.75 < locally < 0.9  # clearly the one or the other
    counts = scenarios.class_counts(stream, labels).double()
    if bool((counts.amax(1) / counts.amin(1) < 1.5).all()):
        overall = "balanced"
    else:
        overall = "fixed" if torch.equal(counts, counts[:1].expand_as(counts)) else "varying"
    return stationary, locally > 0.8, overall


@pytest.mark.parametrize("draw", ["released", "paper"])
@pytest.mark.parametrize(
    ("name", "stationary", "locally", "overall"),
    [
        ("fully", True, True, "balanced"),
        ("continual", False, True, "balanced"),
        ("noniid", True, False, "balanced"),
        ("ptta", False, False, "balanced"),
        ("gli-f", False, False, "fixed"),
        ("gli-v", False, False, "varying"),
    ],
)
def test_comparing_existing_protocols(name, draw, stationary, locally, overall):
    assert measured(name, draw) == (stationary, locally, overall)


# -- ways through the domains ------------------------------------------------------------------------------------------


def visited(stream):
    """Domain numbers in the order of the visits."""
    return torch.unique_consecutive(stream.domain).tolist()


def test_resets_stand_where_domains_begin():
    labels = even(3)
    for name in ("fully", "noniid"):
        assert scenarios.create(name).schedule(labels, 0).reset.nonzero().flatten().tolist() == [0, 1000, 2000]
    for name in set(scenarios.names()) - {"fully", "noniid"}:
        assert not scenarios.create(name).schedule(labels, 0).reset.any()


def test_gradual_plays_the_stream_at_every_severity():
    scenario, labels = scenarios.create("gradual", domains=("snow", "fog")), even(2)
    stream = scenario.schedule(labels, 425)
    assert scenario.domain_names == tuple(f"{name}@{s}" for name in ("snow", "fog") for s in range(1, 6))
    assert [scenario.domain_names[d] for d in visited(stream)] == [
        f"{name}@{s}" for s in range(1, 6) for name in ("snow", "fog")
    ]
    once = scenarios.create("gli-f").schedule(labels, 425)
    assert torch.equal(stream.index, once.index.repeat(5))
    assert torch.equal(stream.domain // 5, once.domain.repeat(5))
    spread = scenario.expand(labels)
    assert len(spread) == 10
    assert torch.equal(scenario.schedule(spread, 425).index, stream.index)
    anew = scenarios.create("gradual", redraw=True).schedule(labels, 425)
    assert torch.equal(anew.index[: len(once.index)], once.index)
    assert not torch.equal(anew.index, stream.index)


def test_zigzag_grows_and_fades():
    scenario, labels = scenarios.create("zigzag", domains=("snow", "fog")), even(2)
    stream = scenario.schedule(labels, 0)
    up_and_down = [1, 2, 3, 4, 5, 4, 3, 2, 1]
    names = [scenario.domain_names[d] for d in stream.domain[::1000]]
    assert names == [f"{name}@{s}" for name in ("snow", "fog") for s in up_and_down]
    assert len(stream.index) == 2 * 9 * 1000


def test_severities_of_a_data_set():
    held = [f"{name}@{s}" for s in range(1, 6) for name in ("snow", "fog")]
    scenario = scenarios.create("gradual", severities=(2, 4)).on(held)
    assert scenario.domains == ("snow", "fog")
    assert scenario.domain_names == ("snow@2", "snow@4", "fog@2", "fog@4")
    assert scenarios.create("zigzag", severities=(3,)).on(["fog"]).domain_names == ("fog@3",)
    assert scenarios.create("ptta").on(held).domain_names == tuple(held)
    with pytest.raises(ValueError, match="need domain 'fog@4'"):
        scenarios.create("gradual", severities=(2, 4)).on(held[:-3])


def test_what_is_played_may_be_a_reversed_view():
    """An array whose strides are negative, which torch does not take."""

    class Backwards(scenarios.Scenario):
        def play(self, labels, classes, rng):
            return np.arange(len(labels))[::-1]

    assert Backwards().schedule([torch.tensor([0, 1, 1])] * 2, seed=0).index.tolist() == [2, 1, 0, 2, 1, 0]


def test_recurring_repeats_the_stream():
    labels = even(2)
    once = scenarios.create("ptta").schedule(labels, 9)
    stream = scenarios.create("recurring", rounds=3).schedule(labels, 9)
    assert all(torch.equal(a, b.repeat(3)) for a, b in zip(stream, once, strict=True))
    anew = scenarios.create("recurring", rounds=3, redraw=True).schedule(labels, 9)
    assert torch.equal(anew.domain, stream.domain)
    assert torch.equal(anew.index[:2000], once.index)
    assert not torch.equal(anew.index[2000:4000], once.index)


def test_mixed_draws_domains_by_weight():
    labels = even(3, per_class=300)
    stream = scenarios.create("mixed", weights=(1, 2, 5)).schedule(labels, 0)
    early = torch.bincount(stream.domain[:2000], minlength=3)  # before any is exhausted
    assert stats.chisquare(early, 2000 * np.array([1, 2, 5]) / 8).pvalue > 0.001
    pairs = early.double() / 2000
    stays = (stream.domain[:2000].diff() == 0).double().mean()
    assert float(stays) == pytest.approx(float((pairs**2).sum()), abs=0.05)  # the domain before tells nothing
    bursts = scenarios.create("mixed", sigma=0.1).schedule(labels, 0)
    alone = scenarios.create("ptta").schedule(labels, 0)
    for d in range(3):
        assert torch.equal(bursts.index[bursts.domain == d], alone.index[alone.domain == d])


def test_iid_is_one_shuffle():
    labels = even(4)
    stream = scenarios.create("iid").schedule(labels, 0)
    table = np.stack([np.bincount(part, minlength=4) for part in np.split(stream.domain.numpy(), 8)])
    assert stats.chi2_contingency(table).pvalue > 0.001
    assert scenarios.local_balance(stream, labels).mean() > 0.9


def test_orders():
    assert len(scenarios.CIFAR_C) == len(scenarios.MNIST_C) == 15
    labels = [torch.arange(20) % 2] * 15
    by_seed = scenarios.create("continual", order="random")
    first, again, other = (visited(by_seed.schedule(labels, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(other) == list(range(15))


# -- schedules as data -------------------------------------------------------------------------------------------------


def test_saved_as_plain_arrays(tmp_path):
    stream = scenarios.create("fully").schedule(even(2), 0)
    scenarios.save(tmp_path / "stream.npz", stream)
    loaded = Schedule(**{name: torch.from_numpy(array) for name, array in np.load(tmp_path / "stream.npz").items()})
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(stream, loaded, strict=True))
    assert scenarios.digest(loaded) == scenarios.digest(stream)
    assert [p.name for p in tmp_path.iterdir()] == ["stream.npz"]


def test_the_digest_is_stable():
    stream = Schedule(torch.tensor([0, 1]), torch.tensor([3, 4]), torch.tensor([True, False]))
    assert scenarios.digest(stream) == "ff22c8249a13252b257584357efec4fb"
    assert scenarios.digest(stream._replace(reset=torch.tensor([True, True]))) != scenarios.digest(stream)


def test_summaries_by_hand():
    labels = [torch.tensor([0, 0, 1, 2]), torch.tensor([1, 1, 1, 1])]
    stream = Schedule(
        torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.tensor([3, 2, 1, 0, 0, 1, 2]), torch.zeros(7, dtype=torch.bool)
    )
    assert scenarios.played_labels(stream, labels).tolist() == [2, 1, 0, 0, 1, 1, 1]
    assert scenarios.class_counts(stream, labels).tolist() == [[2, 1, 1], [0, 3, 0]]
    assert scenarios.class_counts(stream, labels, classes=4).shape == (2, 4)
    assert scenarios.local_balance(stream, labels, window=4).tolist() == pytest.approx([1.0, 0.0])  # 2, 1, 1 of three
    mine, most = (sum(n / 7 * math.log(7 / n) for n in counts) for counts in ((2, 4, 1), (2, 3, 2)))
    assert scenarios.local_balance(stream, labels, window=7).tolist() == pytest.approx([mine / most])
    assert scenarios.local_balance(stream, labels, window=3).tolist()[-1] == 0.0  # one sample is of one class
    assert scenarios.local_balance(stream, labels, window=2).tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="at least 2"):
        scenarios.local_balance(stream, labels, window=1)
    with pytest.raises(ValueError, match="plays domain 1"):
        scenarios.class_counts(stream, labels[:1])
    with pytest.raises(ValueError, match="beyond these labels"):
        scenarios.class_counts(stream, [labels[0][:2], labels[1]])


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("gli-f", {"imbalance": 0.5}, "imbalance of LongTail"),
        ("gli-v", {"imbalance": math.nan}, "imbalance"),
        ("gli-f", {"imbalance": "100"}, "imbalance"),
        ("gradual", {"imbalance": 0}, "imbalance"),
        ("ptta", {"sigma": 0}, "sigma of Dirichlet"),
        ("ptta", {"sigma": -0.1}, "sigma"),
        ("noniid", {"sigma": math.inf}, "sigma"),
        ("mixed", {"sigma": True}, "sigma"),
        ("ptta", {"window": 0}, "window of Dirichlet"),
        ("recurring", {"rounds": 0}, "rounds of recurring"),
        ("recurring", {"rounds": 1.5}, "rounds"),
        ("ptta", {"draw": "papr"}, "draw of ptta"),
        ("ptta", {"order": "best"}, "order of ptta"),
        ("ptta", {"domains": "fog"}, "domains are different names"),
        ("ptta", {"domains": []}, "at least one"),
        ("ptta", {"domains": ["fog", "fog"]}, "domains are different names"),
        ("ptta", {"domains": ["fog", 3]}, "domains are different names"),
        ("ptta", {"classes": 0}, "classes of ptta"),
        ("gradual", {"domains": ["fog@3"]}, "use 'fog', not 'fog@3'"),
        ("gradual", {"severities": (1, 6)}, "numbers from 1 to 5"),
        ("zigzag", {"severities": ()}, "numbers from 1 to 5"),
        ("zigzag", {"severities": (1, 1)}, "numbers from 1 to 5"),
        ("mixed", {"weights": (1, 0)}, "weights are numbers above 0"),
    ],
)
def test_bad_fields_are_refused_at_once(name, fields, said):
    with pytest.raises(ValueError, match=said):
        scenarios.create(name, **fields)


def test_a_scenario_without_domains_has_no_names():
    with pytest.raises(ValueError, match="this scenario has no domain names"):
        _ = scenarios.create("ptta").domain_names


GOOD = torch.arange(40) % 4


@pytest.mark.parametrize(
    ("fields", "labels", "said"),
    [
        ({}, [], "at least one"),
        ({}, GOOD, "one per domain"),
        ({}, [GOOD, GOOD - 1], "labels of domain 1 hold -1"),
        ({"domains": ["fog", "snow"]}, [GOOD, GOOD - 1], "labels of domain 'snow' hold -1"),
        ({}, [GOOD[:0]], "has no images"),
        ({}, [GOOD.reshape(2, 20)], r"of shape \(2, 20\); expected integers, one per image"),
        ({}, [GOOD.float()], "float32"),
        ({}, [GOOD > 1], "bool"),
        ({"classes": 3}, [GOOD], "hold 3; expected classes from 0 to 2"),
        ({}, [GOOD + 10**9], "expected classes from 0 to 65535"),
        ({"domains": ["fog", "snow"]}, [GOOD], "got 1 label tensors; expected 2"),
        ({"domains": ["fog"]}, [GOOD, GOOD], "got 2 label tensors; expected 1"),
    ],
)
@pytest.mark.parametrize("name", ["continual", "ptta", "mixed", "recurring"])
def test_bad_labels_are_refused(name, fields, labels, said):
    with pytest.raises(ValueError, match=said):
        scenarios.create(name, **fields).schedule(labels, 0)


@empty_classes
@pytest.mark.parametrize(
    ("name", "fields", "labels", "seed", "said"),
    [
        ("zigzag", {"domains": ["fog"], "severities": (1, 2)}, [GOOD] * 3, 0, "expected 1 or 2, one per domain"),
        ("zigzag", {"domains": ["fog"], "severities": (1, 2)}, [GOOD, GOOD.flip(0)], 0, "other labels"),
        ("mixed", {"weights": (1, 2)}, [GOOD] * 3, 0, "2 for 3 label sets"),
        ("gli-f", {"imbalance": 50}, [torch.arange(1000) % 10, torch.full((20,), 9)], 0, "domain 1 keeps no image"),
        ("gli-f", {"imbalance": 1e9}, [GOOD], 0, "Lower the imbalance"),
        ("ptta", {"sigma": 1e-6}, even(1), 0, "use draw='paper'"),
        *(("ptta", {}, [GOOD], seed, "seed is an integer") for seed in (-1, 2**32, 0.5, True, None)),
    ],
)
def test_streams_that_cannot_be_made(name, fields, labels, seed, said):
    with pytest.raises(ValueError, match=said):
        scenarios.create(name, **fields).schedule(labels, seed)


def test_an_imbalance_that_leaves_classes_empty():
    labels = [official("cifar100")]
    with pytest.warns(UserWarning, match="an imbalance of 200 leaves 13 of 100 classes without an image"):
        scenarios.create("gli-f", imbalance=200).schedule(labels, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scenarios.create("gli-f", imbalance=100).schedule(labels, 0)


# -- the contract under test -------------------------------------------------------------------------------------------


class Mixed(RealWorld):
    """Changes the finished stream."""

    change = None

    def mix(self, schedule, rng):
        return self.change(schedule)


def shuffled(schedule):
    order = torch.from_numpy(np.random.permutation(len(schedule.index)))
    return Schedule(*(t[order] for t in schedule))


class Unseeded(RealWorld):
    """Forgets the seed."""

    def schedule(self, labels, seed):
        return super().schedule(labels, 0)


class InPlace(RealWorld):
    """Sorts the labels it is given."""

    def schedule(self, labels, seed):
        stream = super().schedule(labels, seed)
        labels[0].copy_(labels[0].sort().values)
        return stream


MUTANTS = {  # what is wrong: (a class, or the change of the stream, the check that finds it)
    "plays its first image again": (lambda s: Schedule(*(torch.cat([t, t[:1]]) for t in s)), "indices_are_valid"),
    "drops the short last batch": (
        lambda s: Schedule(*(t[: len(t) // 64 * 64] for t in s)),
        "counts_match_the_profile",
    ),
    "shuffles with numpy's global generator": (shuffled, "same_seed_same_schedule"),
    "forgets the seed": (Unseeded, "same_seed_same_schedule"),
    "counts images from one": (lambda s: s._replace(index=s.index + 1), "indices_are_valid"),
    "saves memory": (lambda s: s._replace(index=s.index.short()), "is_plain_data"),
    "sorts the labels": (InPlace, "leaves_labels_alone"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_kills(mutant):
    check_scenario(RealWorld(local=Dirichlet()))
    change, check = MUTANTS[mutant]
    cls = change if isinstance(change, type) else type("Mutant", (Mixed,), {"change": staticmethod(change)})
    (named,) = (c for c in SCENARIO_CHECKS if c.__name__ == check)
    with pytest.raises(AssertionError):
        named(cls(local=Dirichlet()))
