"""Make the network more certain of its own predictions, one step a batch: TENT (Wang et al., ICLR 2021)."""

from dataclasses import dataclass

from tribe.methods import EntropyMethod, register


@register("tent")
@dataclass(frozen=True)
class Tent(EntropyMethod):
    """Batch statistics everywhere; the affine parameters follow the gradient of the mean entropy."""

    paper = "Wang et al., Tent: fully test-time adaptation by entropy minimization, ICLR 2021"
