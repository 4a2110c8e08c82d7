"""Memories that hold a few images of every class, for streams with uneven classes. Each arriving image is one decision.

Two memories of M places, for S streams at once, as pure functions over tensors:

    Timely      category-balanced, with timeliness and uncertainty: old or uncertain images leave (RoTTA)
    Reservoir   prediction-balanced reservoir sampling: every arrival of a class is equally likely to be held (NOTE);
                or every newcomer is held, and an image of one of the largest classes leaves (SoTTA)

Each decision depends on those before it, so the B images of a batch are decided one after the other. That loop moves
only marks of N *entries*, the M places and the B newcomers. It runs on the host, for all streams at once, because each
of its thousand tiny operations would be a launch on a GPU. Images stay on the device and are gathered once, afterwards.

Images that are not valid do not arrive: they are not held, do not age others and draw no random number. The first
`held` places are taken, in order of arrival; the others hold zeros. Images are stored flat, `room` values each, in the
network's precision, so the size of a memory, S x M x room, is known before the first image. A memory holds images
of one shape: it is emptied when the shape of a stream's images changes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.core import rng
from tribe.core.backbone import Backbone
from tribe.core.bounds import ANY, CLASS, COUNT, NOT_NEGATIVE, Bounds
from tribe.core.moments import accumulation_dtype
from tribe.core.rng import Key

ROOM = 3 * 32 * 32  # the default number of values of an image that a memory has room for
PLACES = Bounds(0, lambda memory: memory.label.shape[1])  # how many of the M places
DRAWS = 0x4E4F5445  # purpose of the reservoir's random numbers ("NOTE" in ASCII)


class Timely(NamedTuple):
    """RoTTA's memory. It stores when an image arrived, so that ages need no update."""

    image: Tensor  # (S, M, room), in the network's precision
    label: Annotated[Tensor, CLASS]  # (S, M) int64, the class predicted on arrival
    arrival: Annotated[Tensor, COUNT]  # (S, M) int64, how many images arrived before
    uncertainty: Annotated[Tensor, NOT_NEGATIVE]  # (S, M) the entropy of that prediction, float32 at least
    held: Annotated[Tensor, PLACES]  # (S,) int64, places taken
    arrivals: Annotated[Tensor, COUNT]  # (S,) int64, so far
    shape: Annotated[Tensor, ANY]  # (S,) int64, a number that stands for the images' shape

    @property
    def age(self) -> Tensor:
        """Return the number of arrivals since that of each image, itself included: (S, M)."""
        return self.arrivals.unsqueeze(1) - self.arrival


class Reservoir(NamedTuple):
    """NOTE's memory."""

    image: Tensor  # (S, M, room), in the network's precision
    label: Annotated[Tensor, CLASS]  # (S, M) int64, the class predicted on arrival
    predicted: Annotated[Tensor, COUNT]  # (S, K) int64, how often each class was predicted so far
    held: Annotated[Tensor, PLACES]  # (S,) int64, places taken
    arrivals: Annotated[Tensor, COUNT]  # (S,) int64, so far
    shape: Annotated[Tensor, ANY]  # (S,) int64, a number that stands for the images' shape


Memory = TypeVar("Memory", Timely, Reservoir)


class Turnover(NamedTuple):
    """The entries that were held while a batch arrived, and when."""

    entered: Tensor  # (S, N) bool, was held before the batch or was admitted
    since: Tensor  # (N,) int64, after how many images of the batch: 0 if held before it
    until: Tensor  # (S, N) int64, after how many images it left; B + 1: it stayed

    def present(self, passed: Tensor) -> Tensor:
        """Return which entries are held after the first ``passed`` (S,) images of the batch: (S, N)."""
        passed = passed.unsqueeze(1)
        return self.entered & (self.since <= passed) & (passed < self.until)


def new_timely(net: Backbone, streams: int, size: int, room: int) -> Timely:
    """Return an empty memory for RoTTA."""
    image, label, count = _places(net, streams, size, room)
    uncertainty = torch.zeros(streams, size, dtype=accumulation_dtype(net.dtype), device=net.device)
    return Timely(image, label, label.clone(), uncertainty, count, count.clone(), count.clone())


def new_reservoir(net: Backbone, streams: int, size: int, room: int, classes: int) -> Reservoir:
    """Return an empty memory for NOTE."""
    image, label, count = _places(net, streams, size, room)
    predicted = torch.zeros(streams, classes, dtype=torch.int64, device=net.device)
    return Reservoir(image, label, predicted, count, count.clone(), count.clone())


def fit(memory: Memory, x: Tensor) -> Memory:
    """Check that the memory has room for such images (S, B, ...), and drop images of another shape."""
    if (values := math.prod(x.shape[2:])) > (room := memory.image.shape[2]):
        raise ValueError(
            f"images of shape {tuple(x.shape[2:])} have {values} values each; the memory has room for {room}. "
            f"Make the method with room={values}"
        )
    number = 1
    for n in x.shape[2:]:
        number = (number * 1_000_003 + n) % 2**61
    held = torch.where(memory.shape == number, memory.held, 0)
    return memory._replace(held=held, shape=torch.full_like(memory.shape, number))


def filled(memory: Timely | Reservoir) -> Tensor:
    """Return which places are taken: (S, M)."""
    return torch.arange(memory.label.shape[1], device=memory.held.device) < memory.held.unsqueeze(1)


def images(memory: Memory, shape: tuple[int, ...]) -> Tensor:
    """Return the images (S, M, *shape). A free place has a copy of the first image, which is finite in every layer."""
    streams, size, _ = memory.image.shape
    values = memory.image[..., : math.prod(shape)]
    return torch.where(filled(memory).unsqueeze(-1), values, values[:, :1]).reshape(streams, size, *shape)


def hold(memory: Memory, newcomers: Mapping[str, Tensor], turnover: Turnover, valid: Tensor, passed: Tensor) -> Memory:
    """Return the memory after the first ``passed`` (S,) newcomers: one gather for each of its columns.

    ``newcomers`` has a tensor (S, B, ...) for each column (S, M, ...) of the memory; images may be of any shape that
    `fit` accepted.
    """
    present, size = turnover.present(passed), memory.label.shape[1]
    entry = (~present).to(torch.uint8).sort(dim=1, stable=True).indices[:, :size]  # (S, M), in order of arrival
    held = present.sum(1)
    free = torch.arange(size, device=entry.device) >= held.unsqueeze(1)

    def column(old: Tensor, new: Tensor) -> Tensor:
        new = new.flatten(2).to(old.dtype) if old.dim() > 2 else new.to(old.dtype)
        index, blank = (t.view(*t.shape, *[1] * (old.dim() - 2)) for t in (entry, free))
        entries = torch.cat((old[:, :, : new.shape[2]] if old.dim() > 2 else old, new), 1)
        kept = entries.gather(1, index.expand(-1, -1, *entries.shape[2:])).masked_fill_(blank, 0)
        if kept.shape != old.shape:  # images smaller than the room
            kept = torch.cat((kept, torch.zeros_like(old[:, :, kept.shape[2] :])), 2)
        return kept

    columns: dict[str, Any] = {name: column(getattr(memory, name), new) for name, new in newcomers.items()}
    came = valid & (torch.arange(valid.shape[1], device=valid.device) < passed.unsqueeze(1))
    return memory._replace(**columns, held=held, arrivals=memory.arrivals + came.sum(1))


def arrival_numbers(memory: Memory, valid: Tensor) -> Tensor:
    """Return the number of images that arrived before each image of a batch: (S, B)."""
    return memory.arrivals.unsqueeze(1) + valid.cumsum(1) - valid.long()


def admit_timely(memory: Timely, labels: Tensor, uncertainty: Tensor, valid: Tensor, classes: int) -> Turnover:
    """Decide which images are held while a batch arrives: (S, B) labels, uncertainties and valid marks.

    A class accepts an image while it holds less than its quota M / K (a real number) and the memory is not full. At its
    quota the candidates to leave are its images; below it, those of the classes that hold the most. The candidate of
    the highest score, sigmoid(age / M) + uncertainty / log K, the later on a tie, leaves if its score exceeds the
    newcomer's, whose age is 0; else the newcomer is dropped.
    """
    entries = _Entries(memory, labels, valid)
    size, rows = entries.size, entries.rows
    number = _host(arrival_numbers(memory, valid))  # (S, B)
    arrival = np.concatenate((_host(memory.arrival), number), 1)  # (S, N)
    doubt = np.concatenate((_host(memory.uncertainty), _host(uncertainty)), 1).astype(np.float64) / math.log(classes)
    age = (number[:, :, None] - arrival[:, None, :]).clip(0)  # 0 for later newcomers
    score = 1 / (1 + np.exp(-age / size)) + doubt[:, None, :]  # (S, B, N), when each newcomer arrives

    def decide(j: int, counts: Array, alive: Array) -> tuple[Array, Array, Array]:
        below = counts[:, size + j] < size / classes
        candidate = entries.candidates(j, counts, alive, same_class=~below)
        now = np.where(candidate, score[:, j], -np.inf)
        leaver = now.shape[1] - 1 - now[:, ::-1].argmax(1)  # the last one of the highest score
        return below, leaver, now[rows, leaver] > score[:, j, size + j]

    return entries.turnover(decide, memory.held.device)


def add_timely(memory: Timely, x: Tensor, labels: Tensor, uncertainty: Tensor, valid: Tensor, classes: int) -> Timely:
    """Add those of the images (S, B, ...) that are ``valid`` and that the memory admits."""
    for image, label, doubt, counted in _chunks(memory, x, labels, uncertainty, valid):
        turnover = admit_timely(memory, label, doubt, counted, classes)
        arrival = arrival_numbers(memory, counted)
        newcomers = {"image": image, "label": label, "arrival": arrival, "uncertainty": doubt}
        memory = hold(memory, newcomers, turnover, counted, torch.full_like(memory.held, label.shape[1]))
    return memory


def admit_reservoir(
    memory: Reservoir, labels: Tensor, valid: Tensor, seed: Tensor, *, always: bool = False
) -> Turnover:
    """Decide which images are held while a batch arrives: (S, B) labels and valid marks.

    While a place is free, every newcomer enters. Then: if the newcomer's class is not among those that hold the most, a
    random image of a random one of these leaves; else, with probability m_c / n_c (held of the class, predictions of it
    so far), a random image of the same class; else the newcomer is dropped. Classes that hold the most hold the same
    number, so all their images are equally likely. ``seed`` (S,) and the number of the arrival decide the draws.

    ``always``: no newcomer is dropped; the probability is 1 instead of m_c / n_c.
    """
    entries = _Entries(memory, labels, valid)
    size, (streams, batch) = entries.size, labels.shape
    key = Key(seed.cpu().repeat_interleave(batch), arrival_numbers(memory, valid).cpu().flatten())
    coin, lot = rng.uniform(key, DRAWS, (2,)).double().view(streams, batch, 2).unbind(2)
    earlier = entries.same[:, size:, size:] & entries.valid[:, None, :] & np.tri(batch, dtype=bool)
    predictions = _host(memory.predicted.gather(1, labels)) + earlier.sum(2)  # n_c, this one included
    needed = _host(coin) * predictions  # the coin is below m_c / n_c if m_c reaches this
    lots = _host(lot)

    def decide(j: int, counts: Array, alive: Array) -> tuple[Array, Array, Array]:
        mine = counts[:, size + j]
        among = mine >= (counts * alive).max(1)  # its class is one of those that hold the most
        nth = entries.candidates(j, counts, alive, same_class=among).cumsum(1)
        leaver = (nth <= (lots[:, j] * nth[:, -1])[:, None]).sum(1)
        leaver = np.minimum(leaver, nth.shape[1] - 1)  # for an empty memory
        return np.ones_like(among), leaver, ~among | always | (mine >= needed[:, j])

    return entries.turnover(decide, memory.held.device)


def add_reservoir(
    memory: Reservoir, x: Tensor, labels: Tensor, valid: Tensor, seed: Tensor, *, always: bool = False
) -> Reservoir:
    """Add those of the images (S, B, ...) that are ``valid`` and that the memory admits; count their predictions.

    With ``always`` no probability depends on the counts, so they stay at zero.
    """
    for image, label, counted in _chunks(memory, x, labels, valid):
        turnover = admit_reservoir(memory, label, counted, seed, always=always)
        whole = torch.full_like(memory.held, label.shape[1])
        memory = hold(memory, {"image": image, "label": label}, turnover, counted, whole)
        if not always:
            memory = memory._replace(predicted=memory.predicted.scatter_add(1, label, counted.long()))
    return memory


def _chunks(memory: Timely | Reservoir, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split a batch into parts no larger than the memory: the cost of a part grows with its square."""
    return zip(*(t.split(memory.label.shape[1], 1) for t in columns), strict=True)


Array = NDArray[Any]

# (newcomer j, held images of each entry's class (S, N), which entries are held (S, N))
# -> whether j may take a free place, which entry would leave for it otherwise, whether it leaves: (S,) each
Decide = Callable[[int, Array, Array], tuple[Array, Array, Array]]


class _Entries:
    """The N entries that the decisions on one batch are about, on the host: the M places, then the B newcomers."""

    def __init__(self, memory: Timely | Reservoir, labels: Tensor, valid: Tensor) -> None:
        label = _host(torch.cat((memory.label, labels), 1))  # (S, N)
        self.same = label[:, :, None] == label[:, None, :]  # (S, N, N), which share a class
        self.filled, self.valid = _host(filled(memory)), _host(valid)  # (S, M) and (S, B)
        self.size, self.rows = self.filled.shape[1], np.arange(len(label))

    def candidates(self, j: int, counts: Array, alive: Array, same_class: Array) -> Array:
        """Return who may leave for newcomer j (S, N): its class where ``same_class`` (S,), else the largest class."""
        crowd = counts * alive
        largest = crowd == crowd.max(1, keepdims=True)
        among: Array = np.where(same_class[:, None], self.same[:, self.size + j], largest) & alive
        return among

    def turnover(self, decide: Decide, device: torch.device) -> Turnover:
        """Decide on the newcomers, one after the other."""
        (streams, batch), rows, size = self.valid.shape, self.rows, self.size
        alive = np.concatenate((self.filled, np.zeros((streams, batch), bool)), 1)  # (S, N)
        held = self.filled.sum(1)
        counts = (self.same & alive[:, None, :]).sum(2)  # (S, N), held images of each entry's class
        until = np.full(alive.shape, batch + 1)
        for j in range(batch):
            accepts, leaver, leaves = decide(j, counts, alive)
            free = accepts & (held < size) & self.valid[:, j]
            leaves = leaves & ~free & self.valid[:, j]
            enters = free | leaves
            alive[rows, leaver] &= ~leaves
            alive[:, size + j] = enters
            counts += self.same[:, size + j] & enters[:, None]
            counts -= self.same[rows, leaver] & leaves[:, None]
            until[rows, leaver] = np.where(leaves, j + 1, until[rows, leaver])
            held += free
        entered, since = alive | (until <= batch), np.arange(1 - size, batch + 1).clip(0)
        return Turnover(*(torch.from_numpy(t).to(device) for t in (entered, since, until)))


def _host(t: Tensor) -> Array:
    array: Array = t.cpu().numpy()
    return array


def _places(net: Backbone, streams: int, size: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    image = torch.zeros(streams, size, room, dtype=net.dtype, device=net.device)
    label = torch.zeros(streams, size, dtype=torch.int64, device=net.device)
    return image, label, label.new_zeros(streams)
