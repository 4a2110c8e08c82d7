"""The whole of a model file as a module: a step of the bank, and what stands around it.

images -> frame checks -> one pass -> time filter -> logits
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from tribe.core.backbone import Backbone
from tribe.core.state import leaves
from tribe.filters.checked import Checked, CheckedState
from tribe.filters.markov import Markov, MarkovState
from tribe.health.frames import FrameRules, FrameState, judge, start_frames
from tribe.methods.bank import Bank
from tribe.onnx.one_pass import MOVES, OnePass, Screened, screen

FRAMES = ("frames.last", "frames.runs")  # the state of the frame checks, which no state file holds


class Options(NamedTuple):
    """The options of a model file."""

    valid: bool = False  # an input of marks, False for padding
    uint8: bool = False  # images are 0 to 255
    frames: bool = False  # images that show a fault of the camera are not learned from
    source_logits: bool = False  # the source's predictions beside the adapted ones


class ModelGraph(nn.Module):
    """Images, marks and state in; logits and next state out."""

    def __init__(self, net: Backbone, bank: Bank, filter: Markov | None, options: Options) -> None:
        super().__init__()
        self.step, self.filter, self.options, self.rules = OnePass(net, bank), filter, options, FrameRules()
        prefix = "" if filter is None else "method."
        moves = {prefix + name: name for name in MOVES}
        none = torch.empty(0)
        filtered = [] if filter is None else [*leaves(filter.init(1, bank.class_count, none), "filter.")]
        self.bank_names, self.filter_names = moves, filtered
        self.names = [*moves, *filtered, *(FRAMES if options.frames else ())]  # of the state's tensors, in order

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs, before values with names."""
        logits = ["logits", "source_logits"] if self.options.source_logits else ["logits"]
        return [*logits, *(f"next.{name}" for name in self.names)]

    @property
    def named(self) -> list[str]:
        """The names of the values in the graph that have names."""
        chosen = ["net.chosen"] if self.step.method.observe > 1 else []
        return ["observed", *(f"net.{name}" for name in ("x", "scale", "shift", "logits", "moments")), *chosen]

    def forward(self, images: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Images (N, C, H, W), marks (N,) if there are any, the tensors of the state; see `outputs` and `named`."""
        options = self.options
        valid, given = (tensors[0], tensors[1:]) if options.valid else (None, tensors)
        state = dict(zip(self.names, given, strict=True))
        batch = screen(images, valid)
        if options.uint8:
            batch = batch._replace(x=batch.x.to(torch.float32) / 255)
        held: Tensor | None = None
        new: dict[str, Tensor] = {}
        if options.frames:
            held, new = self.check_frames(batch, state)
        own = {name: state[full] for full, name in self.bank_names.items()}
        logits, moved, named = self.step(batch, held, own)
        new |= {full: moved[name] for full, name in self.bank_names.items()}
        if self.filter is not None:
            logits, after = self.filter_logits(logits, batch.valid if valid is None else valid, state)
            new |= after
        source = [self.step.source_logits(batch)] if options.source_logits else []
        return logits, *source, *(new[name] for name in self.names), *(named[name] for name in self.named)

    def check_frames(self, batch: Screened, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return which images (N,) teach nothing, and the next state of the frame checks."""
        before = FrameState(*(state[name] for name in FRAMES))
        verdict, after = judge(self.rules, before, batch.x.unsqueeze(0), batch.valid.unsqueeze(0))
        return verdict.teaches_nothing[0], dict(zip(FRAMES, after, strict=True))

    def filter_logits(self, logits: Tensor, valid: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Filter the logits (N, K) image by image, as `tribe.methods.pipeline.filter_output` does."""
        rule = self.filter
        assert rule is not None

        def one(before: Sequence[Tensor], image: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            z, counted = image
            filtered = rule.step(filter_state(rule, before), z[None, None], counted[None, None])
            after = tuple(t + 0 for t in leaves(filtered.state).values())  # none may be what is given
            return after, (filtered.logits[0, 0], filtered.used[0, 0])

        begun = tuple(state[name] for name in self.filter_names)
        after, (answers, used) = scan(one, begun, (logits, valid))
        return torch.where(used.unsqueeze(1), answers, logits), dict(zip(self.filter_names, after, strict=True))


def filter_state(rule: Markov, tensors: Sequence[Tensor]) -> Any:
    """Return the state of a time filter, from its tensors in order."""
    count = len(MarkovState._fields)
    markov = MarkovState(*tensors[:count])
    return CheckedState(markov, *tensors[count:]) if isinstance(rule, Checked) else markov


def first_frames() -> dict[str, Tensor]:
    """Return the state of the frame checks before the first image."""
    return dict(zip(FRAMES, start_frames(1), strict=True))
