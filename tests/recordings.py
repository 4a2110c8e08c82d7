"""Replay the streams recorded from the released implementation: every method with its recorded settings."""

import dataclasses
import functools

import torch
from torch import nn

from places import SHARED
from tribe import methods
from tribe.core.backbone import Backbone
from tribe.knowledge import Knowledge

GOLDENS = SHARED / "goldens"  # the full recordings, where they lie beside the repository

RECORDED = {
    "methods": {
        "test": ("source", {}),
        "bn": ("bn", {}),
        "tent": ("tent", {}),
        "pl": ("pl", {}),
        "lame": ("lame", {}),
        "eata": ("eata", lambda data, net: fisher(data, net)),
        "cotta": ("cotta", {"p": 0.0}),
        "petal": ("petal", lambda data, net: posterior(data, net)),
        "ttac": ("ttac", lambda data, net: gaussians(data, net)),
        "rotta": ("rotta", {"lr": 1e-2}),
        "note": ("note", lambda data, net: as_recorded(data)),
        "tribe": ("tribe", {"eta": 0.01, "gamma": 0.0, "h0": 0.05}),
        "tribe_h03": ("tribe", {"eta": 0.01, "gamma": 0.0, "h0": 0.3}),
        "tribe_gamma": ("tribe", {"eta": 0.05, "gamma": 0.1, "h0": 0.2}),
        "tribe_gamma5": ("tribe", {"eta": 0.5, "gamma": 0.5, "h0": 0.4}),
        "tribe_noanchor": ("tribe", {"eta": 0.01, "gamma": 0.0, "h0": 0.3, "lambda_anc": 0.0}),
    },
    "methods_k100": {
        "test": ("source", {}),
        "bn": ("bn", {}),
        "tent": ("tent", {}),
        "lame": ("lame", {}),
        "eata": ("eata", lambda data, net: fisher(data, net)),
        "rotta": ("rotta", lambda data, net: drifting(data)),
        "tribe": ("tribe", {"eta": 0.05, "gamma": 0.1, "h0": 0.2}),
        "tribe_gamma5": ("tribe", {"eta": 0.5, "gamma": 0.5, "h0": 0.4}),
    },
}
CASES = [(file, name) for file, names in RECORDED.items() for name in names]
# Of logits (probabilities for LAME, where rounding decides which round is the last); 5e-5 for all others.
TOLERANCE = {"ttac": 1e-3, "petal": 1e-3, "lame": 2e-4}


class Net(nn.Module):
    """The recorded network: three convolutions with BatchNorm, mean over pixels, a linear classifier."""

    def __init__(self, state):
        super().__init__()
        for i in (1, 2, 3):
            out, into = state[f"conv{i}.weight"].shape[:2]
            setattr(self, f"conv{i}", nn.Conv2d(into, out, 3, stride=2 if i == 2 else 1, padding=1, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(out))
        self.fc = nn.Linear(*state["fc.weight"].shape[::-1])
        self.load_state_dict(state)

    def forward(self, x):
        for i in (1, 2, 3):
            x = torch.relu(getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)))
        return self.fc(x.mean((2, 3)))


def recorded_augmentation(x):
    return 0.9 * x.flip(-1) + 0.05


def part(data, prefix):
    """The recorded tensors below a name."""
    return {k.removeprefix(f"{prefix}/"): torch.from_numpy(data[k]) for k in data if k.startswith(f"{prefix}/")}


def knowledge(method, net, tensors):
    """Recorded source knowledge, as if this network had been studied."""
    return Knowledge(method, tensors, net.fingerprint(exact=False))


def fisher(data, net):
    """EATA's settings in the recording."""
    recorded = part(data, "eata_fisher")
    tensors = {name: torch.cat([recorded[f"bn{i}.{name}"] for i in (1, 2, 3)]) for name in ("weight", "bias")}
    return {"d": 0.6, "alpha": 2e5, "fisher": "sum", "knowledge": knowledge("eata", net, tensors)}


def posterior(data, net):
    """PETAL's recorded settings, its posterior of every parameter included."""
    tensors = {f"{kind}/{name}": t for kind in ("mean", "var") for name, t in part(data, f"petal_{kind}").items()}
    return {"spw": 1e-4, "knowledge": knowledge("petal", net, tensors)}


def gaussians(data, net):
    """TTAC's recorded settings, the Gaussians of source features included."""
    return {"lr": 1e-3, "knowledge": knowledge("ttac", net, part(data, "ttac_source"))}


@dataclasses.dataclass(frozen=True, eq=False)
class NoteAsRecorded(methods.get("note")):
    """NOTE whose memory holds what the recorded one drew, in place of its own draws."""

    stream: torch.Tensor | None = None  # (T B, ...), all images
    held: torch.Tensor | None = None  # (T, M), their positions in the memory at each update, -1 padded

    def remember(self, state, x, seen, arriving):
        memory, held = state.memory, self.held[int(state.key.clock[0])].to(x.device)
        pictures = self.stream.to(x.device)[held.clamp_min(0)].flatten(1)
        image = torch.zeros_like(memory.image)
        image[:, :, : pictures.shape[1]] = pictures
        return state._replace(memory=memory._replace(image=image, held=held.ge(0).sum().expand_as(memory.held)))


def as_recorded(data):
    """NOTE's recorded settings, and its memory."""
    stream, held = torch.from_numpy(data["x"]).flatten(0, 1), torch.from_numpy(data["note_memory"])
    return NoteAsRecorded(classes=data["logits/note"].shape[-1], lr=1e-3, stream=stream, held=held)


@dataclasses.dataclass(frozen=True)
class DriftingRotta(methods.get("rotta")):
    """RoTTA whose teacher's frozen weights drift as the recorded one's did: in float32 .999 w + .001 w is not w."""

    def deployed(self, net, state):
        source = dict(net.model.named_parameters())
        drifted = source
        for _ in range(int(state.adam.steps[0])):
            drifted = {name: (1 - self.nu) * t + self.nu * source[name] for name, t in drifted.items()}
        return dataclasses.replace(super().deployed(net, state), weights=[drifted])


def drifting(data):
    """RoTTA's recorded settings where the drift shows: with 100 classes, after 18 updates, 4e-5 in a logit."""
    classes = data["logits/rotta"].shape[-1]
    return DriftingRotta(classes=classes, lr=1e-2, augment=recorded_augmentation)


def eagerly(method, net):
    return functools.partial(method.step, net)


def replay(data, name, method, fields, streams=1, dtype=torch.float32, device="cpu", stepping=eagerly):
    """Play the recorded stream (in each of `streams` rows) and return all logits and the final state.

    `fields` are the method's settings, or a function (recording, network) that makes them, or the method. `stepping`
    makes the step of a method and a network.
    """
    net = Backbone(Net(part(data, "net")).to(device, dtype))
    if callable(fields):
        fields = fields(data, net)
    known = {field.name for field in dataclasses.fields(methods.get(method))}
    if "augment" in known and isinstance(fields, dict):
        fields = {**fields, "augment": recorded_augmentation}
    if isinstance(fields, methods.Method):
        method = fields
    else:
        method = methods.create(method, classes=data[f"logits/{name}"].shape[-1], **fields)
    state, outputs, step = method.init(net, streams), [], stepping(method, net)
    for x in torch.from_numpy(data["x"][: len(data[f"logits/{name}"])]).to(device, dtype):
        logits, state = step(state, x.expand(streams, *x.shape))
        outputs.append(logits)
    return torch.stack(outputs, 1), state  # (S, T, B, K)
