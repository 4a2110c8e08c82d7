"""The outputs of a method for every image, kept while a stream is played, so that time filters can be replayed."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tribe.experiments.stream import Stream
from tribe.io.states import StateFileError

Kind = Literal["logits", "probabilities"]  # `Method.output`


class Outputs(NamedTuple):
    """The outputs of a method for the images of one stream, in order, and how they were cut into batches."""

    values: Tensor  # (N, K) in the precision of the network; images that could not be read have a row, too
    valid: Tensor  # (N,) False: an image that could not be read, which the record leaves out
    sizes: Tensor  # (steps,) int64, images of each batch; sums to N
    reset: Tensor  # (steps,) True: the stream went back to the source before this batch
    kind: Kind

    def damage(self, images: int) -> str | None:
        """Return why no run has written such outputs next to a record of so many images; None for sound ones."""
        if int(self.valid.sum()) != images or len(self.values) != len(self.valid):
            return f"its outputs are of {int(self.valid.sum()):,} images; expected {images:,}"
        if (
            len(self.sizes) != len(self.reset)
            or bool((self.sizes < 0).any())
            or int(self.sizes.sum()) != len(self.valid)
        ):
            return f"its batches hold {int(self.sizes.sum()):,} images; expected {len(self.valid):,}"
        return None


def predictions(output: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the largest probability (S, B) of a method's output (S, B, K), and its class; both on the CPU."""
    p = output if kind == "probabilities" else output.float().softmax(-1)
    confidence, prediction = (t.cpu() for t in p.max(-1))  # waits for the device
    return confidence, prediction


class OutputTable:
    """The outputs of a run so far. Memory is allocated once: 150,000 images of 1,000 classes are 600 MB."""

    def __init__(self, stream: Stream, kind: Kind) -> None:
        self._stream, self._kind = stream, kind
        self._lengths = [len(schedule.index) for schedule in stream.schedules]
        self._values: list[Tensor] = []  # (N, K) of each stream, once K is known
        self._valid = [torch.zeros(length, dtype=torch.bool) for length in self._lengths]

    def append(self, step: int, output: Tensor, valid: Tensor) -> None:
        """Keep the outputs (S, B, K) of a step; steps count from 1."""
        placed = output.cpu()
        if not self._values:
            self._values = [placed.new_zeros(length, placed.shape[-1]) for length in self._lengths]
        table = self._values[0]
        if (table.shape[1], table.dtype) != (placed.shape[-1], placed.dtype):
            raise StateFileError(
                f"the checkpoint holds outputs of {table.shape[1]} classes as {table.dtype}; this network gives "
                f"{placed.shape[-1]} as {placed.dtype}: remove the checkpoint"
            )
        for s, cuts in enumerate(self._stream.cuts):
            if step <= len(cuts):
                cut = cuts[step - 1]
                images = cut.stop - cut.start
                self._values[s][cut], self._valid[s][cut] = placed[s, :images], valid[s, :images]

    def cut(self, step: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint after a step, by name."""
        for s, done in enumerate(self._done(step)):
            yield f"{s}.valid", self._valid[s][:done]
            yield f"{s}.values", self._values[s][:done] if self._values else torch.empty(0, 0)

    def like(self, step: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the names, shapes and types that a checkpoint after a step must have.

        The number of classes and the precision are those of the first stream in the file.
        """
        first = tensors.get("0.values", torch.empty(0))
        first = first if first.dim() == 2 and first.is_floating_point() else torch.empty(0, 0)
        like = {}
        for s, done in enumerate(self._done(step)):
            like[f"{s}.valid"] = self._valid[s][:done]
            like[f"{s}.values"] = first.new_empty(done, first.shape[1])
        return like

    def _done(self, step: int) -> list[int]:
        """Return the number of images of each stream after a step."""
        return [sum(cut.stop - cut.start for cut in cuts[:step]) for cuts in self._stream.cuts]

    def resume(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with the tensors of a checkpoint, as `cut` named them."""
        stored = [tensors[f"{s}.values"] for s in range(len(self._lengths))]
        self._values = [v.new_zeros(length, v.shape[1]) for v, length in zip(stored, self._lengths, strict=True)]
        for s, values in enumerate(stored):
            self._values[s][: len(values)] = values
            self._valid[s][: len(values)] = tensors[f"{s}.valid"]

    def of_streams(self) -> list[Outputs]:
        """Return the outputs of each stream, once all steps are done."""
        return [
            Outputs(
                values,
                valid,
                torch.tensor([cut.stop - cut.start for cut in cuts], dtype=torch.int64),
                torch.tensor([bool(schedule.reset[cut.start]) for cut in cuts], dtype=torch.bool),
                self._kind,
            )
            for values, valid, cuts, schedule in zip(
                self._values, self._valid, self._stream.cuts, self._stream.schedules, strict=True
            )
        ]
