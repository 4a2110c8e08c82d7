"""Read weights into a network, or say why they do not fit; an error leaves the network unchanged."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tribe.core.calling import Normalize
from tribe.data.datasets.files import data_root
from tribe.data.models.architectures import Architecture, Normalization, architecture
from tribe.io import json_files
from tribe.io.tensors import read_safetensors

PREFIXES = ("module.", "model.", "_orig_mod.")  # that DataParallel, wrappers and torch.compile put before names
ENVELOPES = ("state_dict", "model_state_dict", "model")  # the keys of a state dict in files of training scripts
CONSTANTS = (("mu", "sigma"), ("mean", "std"), ("normalize.mean", "normalize.std"))  # input normalisation
TRAINED_HERE = ("mnist", "cifar10", "cifar100")  # data sets for which `tribe train` has a recipe
PUBLISHED = {  # RobustBench's names of networks; their files lie in models/DATASET/corruptions, for others in ckpt/...
    "wrn28_10": "Standard",
    "wrn40_2_augmix": "Hendrycks2020AugMix_WRN",
    "resnext29_augmix": "Hendrycks2020AugMix_ResNeXt",
}
SHIPPED = Path(__file__).parent / "shipped"  # weights that come with the package
CHANNELS = 1000  # of an image, at most
ROUNDING = 1e-3  # tolerance between the constants of a file, which may have half precision, and of the network


class WeightsError(ValueError):
    """Weights that cannot be used, and why."""


def find(model: str, dataset: str, root: str | PathLike[str] | None = None) -> Path:
    """Find the weights of a named network trained on a data set: under ``root``/weights, or in the package.

    Files of RobustBench are found in its folders under ``root``: ``models/cifar10/corruptions/Standard.pt``.

    ``root`` is the folder of all data sets; by default $TRIBE_DATA, else the user's cache directory.
    """
    root = data_root() if root is None else Path(root)
    name = f"{model}_{dataset}.safetensors"
    places = [root / "weights" / name, root / "weights" / f"{model}.safetensors"]
    if model in PUBLISHED:
        places += [root / folder / dataset / "corruptions" / f"{PUBLISHED[model]}.pt" for folder in ("models", "ckpt")]
    for place in (*places, SHIPPED / name):
        if place.is_file():
            return place
    architecture(model)  # raises an error for a wrong name
    looked = " or ".join(str(place) for place in places)
    made = f", or make them: tribe train {dataset} --model {model} --data {root}" if dataset in TRAINED_HERE else ""
    raise FileNotFoundError(
        f"no weights of {model} for {dataset}: looked for {looked}. Place them there{made}. Commands with --weights "
        "FILE take them from anywhere"
    )


def load(model: str | nn.Module, path: str | PathLike[str], **fields: Any) -> nn.Module:
    """Read weights into a network and return it in evaluation mode.

    Args:
        model: a name, as `create` takes it, or a network, which is filled in place.
        path: a safetensors file, or a state dict written by `torch.save` (.pt, .pth), read without running code in it.
            Half precision is converted to the network's precision; prefixes of wrappers are removed.
        fields: the fields that `create` takes, with a name. By default the number of classes and the constants of
            input normalisation come from the file.
    """
    if isinstance(model, str):
        design = architecture(model, **fields)  # raises an error for a wrong name before a large file is read
        tensors = read(path, f"tribe train DATASET --model {model} makes one (of {', '.join(TRAINED_HERE)})")
        design = _with_file_fields(path, design, tensors, fields)
        model = design.build()
    elif not isinstance(model, nn.Module):
        raise TypeError(f"expected a name or a torch.nn.Module; got {type(model).__name__}")
    elif fields:
        raise TypeError(f"{', '.join(sorted(fields))} can be set for a network built by name, not for an existing one")
    else:
        tensors = read(path)
    wanted = model.state_dict()
    found = _fit_names(path, tensors, wanted)
    _check_constants(path, found, wanted, model)
    _check(path, found, wanted)
    model.load_state_dict(found, strict=False)  # converts the precision; all names were checked above
    return model.eval()


def read(path: str | PathLike[str], otherwise: str = "name another") -> dict[str, Tensor]:
    """Return the tensors of a weights file by name; ``otherwise`` is what to do if the file is missing."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a weights file")
    if not path.is_file():
        raise FileNotFoundError(f"no weights file at {path}: place it there, or {otherwise}")
    if path.suffix == ".safetensors":
        check_card(path)
        try:
            return read_safetensors(path)[1]
        except ValueError as error:
            raise WeightsError(f"{path} is not a safetensors file, or it was cut short ({error})") from error
    if path.suffix in (".pt", ".pth"):
        return _read_pt(path)
    raise WeightsError(f"{path}: expected a .safetensors, .pt or .pth file; got {path.suffix or 'no suffix'}")


def check_card(path: Path) -> None:
    """Raise if weights are not those of the card beside them, which `tribe train` writes with their sha256."""
    card = path.with_suffix(".json")
    if not card.is_file():
        return
    try:
        advice = f"Get it again, or remove it if it is not a card of {path.name}"
        recorded = json_files.read(card, {"sha256?": str}, advice).get("sha256")
    except ValueError as error:
        raise WeightsError(str(error)) from error
    if recorded is None:  # some other JSON file
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if recorded != found:
        raise WeightsError(
            f"{path} is damaged, or it is not the file that {card.name} describes: its sha256 is {found[:12]}..., the "
            f"card says {recorded[:12]!r}.... Get both files again; if you replaced the weights on purpose, remove "
            f"{card.name}"
        )


def _read_pt(path: Path) -> dict[str, Tensor]:
    """Read the state dict in a file written by `torch.save`, perhaps that of a training script."""
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch fails in many ways on damaged bytes
        raise WeightsError(
            f"{path} is not a state dict written by torch.save, it was cut short, or it holds Python objects beside "
            f"tensors, which could run code when read ({type(error).__name__}): save model.state_dict() alone, best as "
            "safetensors"
        ) from error
    for key in ENVELOPES:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not (isinstance(content, Mapping) and content and all(isinstance(t, Tensor) for t in content.values())):
        names = " or ".join(map(repr, ENVELOPES))
        raise WeightsError(f"{path} holds no state dict: expected names with tensors, or those under {names}")
    for name, tensor in content.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
            raise WeightsError(
                f"{path}: {name} is a sparse, quantised, nested or meta tensor; expected ordinary numbers: save "
                "tensor.to_dense(), tensor.dequantize() or the loaded weights"
            )
    return {str(name): tensor.detach() for name, tensor in content.items()}


def _with_file_fields(
    path: object, design: Architecture, tensors: Mapping[str, Tensor], given: Mapping[str, Any]
) -> Architecture:
    """Return the configuration with the fields that the file determines and the caller did not set."""
    found: dict[str, Any] = {}
    bare = {_bare(name): tensor for name, tensor in tensors.items()}
    head = bare.get(f"{design.head}.weight")
    if head is not None and head.dim() == 2 and len(head):
        with torch.device("meta"):  # takes no memory
            features = design.build().get_submodule(design.head).in_features
        if head.shape[1] != features:
            raise WeightsError(f"{path}: the shapes do not fit; its classifier is not that of {design.name}")
        found["classes"] = len(head)
    if constants := _constants(path, bare):
        found["normalize"] = constants
    return dataclasses.replace(design, **{field: value for field, value in found.items() if field not in given})


def _bare(name: str, own: Iterable[str] = ()) -> str:
    """Return a name without prefixes, unless the network itself has it with them."""
    while name not in own and name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


def _fit_names(path: object, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shared = "model." if wanted and all(name.startswith("model.") for name in wanted) else ""  # a wrapper of tribe
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        bare = _bare(name, wanted)
        own = bare if bare in wanted or shared + bare not in wanted else shared + bare
        if own in found:
            raise WeightsError(f"{path} holds {own} twice, with and without a prefix; keep one of the two")
        found[own] = tensor
    return found


def _constants(path: object, tensors: Mapping[str, Tensor]) -> Normalization | None:
    """Return the input normalisation in a file, if it has one."""
    for names in CONSTANTS:
        if not all(name in tensors for name in names):
            continue
        mean, std = (tensors[name] for name in names)
        for t in (mean, std):
            if t.is_complex() or t.numel() > CHANNELS or not bool(t.isfinite().all()):
                raise WeightsError(f"{path}: {' and '.join(names)} are not a finite mean and std of each channel")
        if len(mean.flatten()) != len(std.flatten()) or not bool((std > 0).all()):
            raise WeightsError(
                f"{path}: {names[1]} is {std.flatten().tolist()}; expected a number above 0 for each channel"
            )
        return tuple(mean.flatten().tolist()), tuple(std.flatten().tolist())
    return None


def _check_constants(path: object, found: dict[str, Tensor], wanted: Mapping[str, Tensor], model: nn.Module) -> None:
    """Remove the constants of input normalisation; raise for those that the network does not use."""
    foreign = {name: tensor for name, tensor in found.items() if name not in wanted}
    constants = _constants(path, foreign)
    if constants is None:
        return
    layer = next((m for m in model.modules() if isinstance(m, Normalize)), None)
    own = None if layer is None else (layer.mean.tolist(), layer.std.tolist())
    if own is None or np.shape(own) != np.shape(constants) or not np.allclose(own, constants, rtol=0, atol=ROUNDING):
        inside = "does not normalise images" if own is None else f"uses mean {own[0]} and std {own[1]}"
        raise WeightsError(
            f"{path} needs images normalised with mean {constants[0]} and std {constants[1]}, but the network "
            f"{inside}: build it with normalize={constants}"
        )
    for name in (name for pair in CONSTANTS for name in pair if name in foreign):
        del found[name]


def _check(path: object, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise for weights of another network, and for damaged ones."""
    needed = [n for n in wanted if not n.endswith("num_batches_tracked")]  # old files do not have these counts
    missing = [n for n in needed if n not in found]
    unexpected = [n for n in found if n not in wanted]
    if missing or unexpected:
        lists = [f"it lacks {_some(missing)}"] * bool(missing) + [f"it has {_some(unexpected)}"] * bool(unexpected)
        foreign = len(missing) == len(needed)
        hint = "no name fits: these are the weights of another network" if foreign else "the names do not fit"
        raise WeightsError(f"{path}: {hint}; {', and '.join(lists)}{' in addition' if unexpected else ''}")
    wrong = [
        f"{name} is {tuple(tensor.shape)} where the network has {tuple(wanted[name].shape)}"
        for name, tensor in found.items()
        if tensor.shape != wanted[name].shape
    ]
    if wrong:
        raise WeightsError(f"{path}: the shapes do not fit; {_some(wrong)}")
    for name, tensor in found.items():
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise WeightsError(f"{path}: {name} is {tensor.dtype}; expected floating-point weights, not quantised ones")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{path}: {name} holds values that are not finite")


def _some(names: list[str], most: int = 4) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
