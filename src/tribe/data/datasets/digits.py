"""Digits of other collections for a network that was trained on MNIST: a real shift. One domain, with the set's name.

MNIST's digits fill a box of 20 x 20 pixels in the middle of 28 x 28, bright on black, and so do these: they are resized
to that box.
"""

import gzip
import importlib
import io
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from tribe.data.datasets import register
from tribe.data.datasets.clean import Bytes, Clean
from tribe.data.datasets.files import find
from tribe.io.files import regular_size

LARGEST = 2**25  # bytes of USPS's text, unpacked; the training images have 15 MB
COLUMNS = 1 + 16 * 16  # a label, and the grey values of an image


@dataclass(frozen=True)
class OtherDigits(Clean):
    """A base class: digits that are not MNIST's, with its presets and networks."""

    shape = (1, 28, 28)
    clean_name = "mnist"

    @property
    def domains(self) -> Sequence[str]:
        """The name of the set: its images are shifted, not clean."""
        return (self.name,)  # type: ignore[attr-defined]  # set by @register


@register("optdigits")
@dataclass(frozen=True)
class Optdigits(OtherDigits):
    """Handwritten digits of 8 x 8 (Alpaydin & Kaynak, 1998): the 1,797 test images, which scikit-learn holds."""

    def _open(self) -> tuple[Bytes, NDArray[Any]]:
        if self.split != "test":
            raise ValueError("scikit-learn holds the test images of optdigits alone: split='test'")
        try:
            digits: Any = importlib.import_module("sklearn.datasets").load_digits()
        except ImportError as error:
            raise ImportError(
                "optdigits needs scikit-learn, which holds its images: pip install 'tribe-tta[digits]'"
            ) from error
        return _as_mnist(digits.images / 16), digits.target


@register("usps")
@dataclass(frozen=True)
class Usps(OtherDigits):
    """Handwritten digits of 16 x 16 from envelopes (Hull, 1994): zip.test.gz and zip.train.gz, text of -1 to 1."""

    def _open(self) -> tuple[Bytes, NDArray[Any]]:
        name, place = f"zip.{self.split}", shlex.quote(str(self._root / "usps"))
        url = "https://hastie.su.domains/ElemStatLearn/datasets"
        hint = f"To place it, run: mkdir -p {place} && curl -fL {url}/{name}.gz -o {place}/{name}.gz"
        path = find(self._root, f"usps/{name}.gz", f"usps/{name}", what=f"USPS's {name}", hint=hint)
        expected = f"expected text with {COLUMNS} numbers a line: a label, and 256 grey values from -1 to 1"
        try:
            regular_size(path, LARGEST)
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                content = file.read(LARGEST + 1)  # a small gzip file may unpack to any size
            if not 0 < len(content.strip()) <= LARGEST:
                raise ValueError(f"it has no numbers, or more than {LARGEST:,} bytes")
            rows = np.loadtxt(io.BytesIO(content), ndmin=2, comments=None)
        except (ValueError, OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{path} cannot be read ({reason}): {expected}") from error
        if rows.shape[1] != COLUMNS:
            raise ValueError(f"{path} has {rows.shape[1]} numbers a line: {expected}")
        labels, grey = rows[:, 0], rows[:, 1:]
        if not (np.abs(grey) <= 1).all() or not np.isin(labels, range(self.count)).all():
            raise ValueError(f"{path} has another label than 0 to 9, or a grey value beyond -1 to 1: {expected}")
        return _as_mnist((grey.reshape(-1, 16, 16) + 1) / 2), labels


def _as_mnist(grey: NDArray[Any]) -> Bytes:
    """Return images (n, h, w) of 0 to 1 in the box of MNIST's digits, as bytes (n, 28, 28)."""
    box = F.interpolate(torch.from_numpy(grey).unsqueeze(1), (20, 20), mode="bilinear")
    return F.pad(box[:, 0], (4, 4, 4, 4)).mul(255).round().byte().numpy()
