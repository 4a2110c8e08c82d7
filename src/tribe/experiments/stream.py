"""Play a data set as a scenario says: batches of images for many streams at once, read ahead in the background."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.core.validation import good_images
from tribe.data.datasets import Dataset
from tribe.data.scenarios import Scenario, Schedule
from tribe.fields import is_whole, require


class Batch(NamedTuple):
    """The next images of every stream. Labels and domains are for the record; no method sees them."""

    x: Tensor  # (S, B, ...)
    y: Tensor  # (S, B) int64, -1 where unknown
    domain: Tensor  # (S, B) int64
    valid: Tensor  # (S, B) False: padding, where streams differ in length, or an image that could not be read
    reset: Tensor  # (S,) True: go back to the source before this batch


class Stream:
    """One scenario, played once per seed, side by side.

    Batches run over the concatenated stream and straddle domain borders; they are cut short only where the scenario
    asks for a reset, and at the end. A stream that is over goes on as padding until the longest one ends. An image that
    a data set gives as NaN, since its file is damaged, keeps its place but is not valid.
    """

    def __init__(self, dataset: Dataset, scenario: Scenario, seeds: Sequence[int] = (0,), batch: int = 64) -> None:
        require(is_whole(batch, least=1), "batch is how many images a stream and step, an integer of at least 1", batch)
        if not isinstance(scenario, Scenario):
            made = f": tribe.scenarios.create({scenario!r}) makes one" if isinstance(scenario, str) else ""
            raise TypeError(f"scenario is a tribe.scenarios.Scenario; got {scenario!r}{made}")
        if isinstance(seeds, str) or not isinstance(seeds, Iterable):
            raise TypeError(f"seeds is a sequence of integers, one a stream, such as (0, 1); got {seeds!r}")
        seeds = tuple(int(seed) if is_whole(seed) else seed for seed in seeds)
        if not seeds:
            raise ValueError("a stream needs at least one seed")
        if scenario.domains is None:
            scenario = scenario.on(dataset.domains)
        self.domains = scenario.domain_names
        if lacking := [name for name in self.domains if name not in dataset.domains]:
            have = ", ".join(dataset.domains)
            raise ValueError(f"the scenario plays {', '.join(lacking[:4])}, which the data set lacks; it has {have}")
        self.dataset, self.scenario, self.seeds, self.batch = dataset, scenario, seeds, int(batch)
        self.labels = [dataset.labels(name) for name in self.domains]
        self.schedules = [scenario.schedule(self.labels, seed) for seed in seeds]
        self.cuts = [_cuts(schedule, batch) for schedule in self.schedules]  # the images of each batch, by stream

    @property
    def images(self) -> int:
        """The number of images of all streams."""
        return sum(len(schedule.index) for schedule in self.schedules)

    def __len__(self) -> int:
        """Return the number of batches."""
        return max(len(cuts) for cuts in self.cuts)

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches from the beginning."""
        return self.starting_at(0)

    def starting_at(self, step: int, *, pin: bool = False, ahead: int = 1) -> Iterator[Batch]:
        """Yield the batches from one on, as a run that is resumed needs them.

        While one is used, the next ``ahead`` are read; more than one pays on a GPU alone. With ``pin``, they are in
        memory that a GPU copies from by itself. A caller that stops early waits for nothing.
        """
        reading: deque[Future[Batch]] = deque()
        for t in range(step, len(self)):
            if not reading:
                reading.append(self._begin(t, pin))
            batch = reading.popleft().result()
            for following in range(t + 1 + len(reading), min(t + 1 + ahead, len(self))):
                reading.append(self._begin(following, pin))
            yield batch

    def _begin(self, step: int, pin: bool) -> "Future[Batch]":
        """Read a batch in a new thread.

        A thread that lives on would keep its own team of OpenMP threads, which costs small networks on a CPU a third.
        An executor takes no work once the main thread has ended. The thread is a daemon only if its parent is one: a
        thread that is killed inside torch aborts the process, so a program that ends waits for the batch.
        """
        future: Future[Batch] = Future()

        def read() -> None:
            try:
                future.set_result(self._read(step, pin))
            except BaseException as error:  # the thread that waits for the batch raises it
                future.set_exception(error)

        threading.Thread(target=read, name=f"tribe-reader-{step}").start()
        return future

    def _read(self, step: int, pin: bool) -> Batch:
        """Read a batch.

        Using new memory costs nearly as much as decoding a JPEG file of the same size. So the images of one stream are
        not copied, unless to pinned memory, which torch uses again.
        """
        cuts = [cut[step] if step < len(cut) else slice(0, 0) for cut in self.cuts]
        width = max(cut.stop - cut.start for cut in cuts)
        rows = [self._row(schedule, cut, width) for schedule, cut in zip(self.schedules, cuts, strict=True)]
        images, *columns = zip(*rows, strict=True)
        y, domain, valid = map(torch.stack, columns)
        if len(rows) == 1 and len(images[0]) == width and images[0].dtype == torch.float32 and not pin:
            x = images[0].unsqueeze(0)
        else:
            shape = next(part.shape[1:] for part in images if len(part))
            x = torch.empty(len(rows), width, *shape, pin_memory=pin)  # padding is not valid, so it becomes 0
            for row, part in zip(x, images, strict=True):
                if len(part):
                    row[: len(part)] = part
        valid &= good_images(x)
        if not valid.all():
            x[~valid] = 0
        starts = [c.stop > c.start and bool(s.reset[c.start]) for s, c in zip(self.schedules, cuts, strict=True)]
        return Batch(x, y.where(valid, -1), domain.where(valid, -1), valid, torch.tensor(starts))

    def _row(self, schedule: Schedule, cut: slice, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return images, labels, domains and marks of one stream's batch; all but the images padded to ``width``."""
        domain, index = schedule.domain[cut], schedule.index[cut]
        y, padded = (torch.full((width,), -1) for _ in range(2))
        images: Tensor = torch.empty(0)
        for d in domain.unique().tolist():
            here = domain == d
            part = self.dataset.images(self.domains[d], index[here])
            if len(part) == len(index):  # the usual case: large images are not copied
                images = part
            else:
                images = images if len(images) else part.new_empty(len(index), *part.shape[1:])
                images[here] = part
            y[: len(index)][here] = self.labels[d][index[here]]
        padded[: len(index)] = domain
        return images, y, padded, torch.arange(width) < len(index)


def _cuts(schedule: Schedule, batch: int) -> list[slice]:
    """Return where batches begin and end: every ``batch`` images, and before every reset."""
    borders = [*schedule.reset.nonzero().flatten().tolist(), len(schedule.index)]
    cuts, start = [], 0
    for border in borders:
        while start < border:
            cuts.append(slice(start, min(start + batch, border)))
            start = cuts[-1].stop
    return cuts
