"""The order in which the paper plays its corruptions, and the names of their severities."""

from collections.abc import Iterable

from tribe.registry import nearest

CIFAR_C = (
    *("motion_blur", "snow", "fog", "shot_noise", "defocus_blur", "contrast", "zoom_blur", "brightness", "frost"),
    *("elastic_transform", "glass_blur", "gaussian_noise", "pixelate", "jpeg_compression", "impulse_noise"),
)
IMAGENET_C = CIFAR_C
MNIST_C = (
    *("shot_noise", "impulse_noise", "glass_blur", "motion_blur", "shear", "scale", "rotate", "brightness"),
    *("translate", "stripe", "fog", "spatter", "dotted_line", "zigzag", "canny_edges"),
)


def at_severity(names: Iterable[str], severity: int) -> tuple[str, ...]:
    """Name one severity of every corruption.

    >>> at_severity(("fog", "snow"), 3)
    ('fog@3', 'snow@3')
    """
    if not 1 <= severity <= 5:
        raise ValueError(f"a severity is 1, 2, 3, 4 or 5; got {severity}")
    return tuple(f"{name}@{severity}" for name in names)


def paper_order(names: Iterable[str]) -> list[int]:
    """Positions of the names in the order of the paper; severities of one corruption keep their order.

    The names are looked up in CIFAR-C (and ImageNet-C) if it has all of them, else in MNIST-C.

    >>> paper_order(["fog@5", "snow@5", "motion_blur@5"])
    [2, 1, 0]
    """
    plain = [name.partition("@")[0] for name in names]
    for table in (CIFAR_C, MNIST_C):
        if set(plain) <= set(table):
            return sorted(range(len(plain)), key=lambda i: table.index(plain[i]))
    known = {*CIFAR_C, *MNIST_C}
    for name in plain:
        if name not in known:
            raise ValueError(f"the paper has no domain {name!r}: {nearest(name, known)}")
    raise ValueError("no corruption set of the paper holds all these domains: some are of CIFAR-C, some of MNIST-C")
