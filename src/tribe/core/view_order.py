"""Find out in which order a network folds several views of an image (crops, frames) into its batch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tribe.core.slots import Pass, Slot, SlotHook, set_current_pass


class _Received(BaseException):
    """Ends a trial pass at the slot of interest. A BaseException, so that the network does not catch it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@torch.no_grad()
def views_come_first(slot: Slot, model: nn.Module, like: Tensor, source_pass: Callable[[int, SlotHook], Pass]) -> bool:
    """Whether the views of an image reach a slot a batch apart, as after torch.cat of two batches, or adjacent.

    Two trial passes answer it: the images of the second are those of the first in reverse order, so the position where
    the first image is found again shows the order.
    """

    def input_of_slot(images: Tensor) -> Tensor | None:
        def stop_at_slot(at: Slot, x: Tensor) -> None:
            if at.index == slot.index and len(x) > len(images):
                raise _Received(x)

        try:
            with set_current_pass(source_pass(len(images), stop_at_slot)):
                model(images)
        except _Received as received:
            return received.x
        return None

    noise = torch.rand(2, *like.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu").to(like)
    one, two = input_of_slot(noise.clone()), input_of_slot(noise.flip(0))
    if one is not None and two is not None and len(two) == len(one) and len(one) % 2 == 0:
        half = len(one) // 2
        adjacent, apart = ((a - b).abs().max().item() for a, b in ((one[:half], two[half:]), (one[::2], two[1::2])))
        if min(adjacent, apart) <= 0.05 * one.abs().max().item():  # room for rounding in bfloat16
            return apart < adjacent
    raise RuntimeError(
        f"layer {slot.name!r} receives several samples of each image, neither adjacent nor a batch apart: which image "
        "they belong to cannot be determined"
    )
