"""The 10,000 MNIST test images that come with the package, so that everything runs offline (see NOTICE)."""

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).parent / "data" / "mnist_test.npz"


@cache
def mnist_test() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pixels (10000, 28, 28) and labels (10000,), as in the published idx files; read-only.

    >>> mnist_test()[0].shape
    (10000, 28, 28)
    """
    with np.load(FILE, allow_pickle=False) as file:
        pixels, labels = file["images"], file["labels"]
    pixels.flags.writeable = labels.flags.writeable = False
    return pixels, labels
