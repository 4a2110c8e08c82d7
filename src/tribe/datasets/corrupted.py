"""A clean data set, corrupted on the fly: the same pictures every time, whatever the order they are asked for in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tribe import corruptions
from tribe.datasets import Dataset
from tribe.registry import nearest


@dataclass(frozen=True)
class Corrupted:
    """Every image of a clean data set under every corruption; a domain is "fog@5".

    Pixels are cut to bytes as the published files hold them: MNIST-C rounds, the others truncate.

    Args:
        clean: the data set to corrupt; its first domain is used.
        names: corruptions, see ``tribe.corruptions.names``.
        severities: of each.
        seed: of the corruptions' randomness.
    """

    clean: Dataset
    names: Sequence[str]
    severities: Sequence[int] = (5,)
    seed: int = 0

    @property
    def classes(self) -> Sequence[str]:
        """Those of the clean data set."""
        return self.clean.classes

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every severity."""
        return tuple(f"{name}@{severity}" for name in self.names for severity in self.severities)

    def labels(self, domain: str) -> Tensor:
        """The clean images' labels."""
        self._parse(domain)
        return self.clean.labels(self.clean.domains[0])

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images and corrupt them."""
        name, severity = self._parse(domain)
        images = self.clean.images(self.clean.domains[0], index)
        levels = corruptions.apply(images, name, severity, seed=self.seed, index=index) * 255
        return (levels.round() if images.shape[1:] == (1, 28, 28) else levels).to(torch.uint8).float().div_(255)

    def _parse(self, domain: str) -> tuple[str, int]:
        if domain not in self.domains:
            raise ValueError(f"unknown domain {domain!r}: {nearest(domain, self.domains)}")
        name, _, severity = domain.partition("@")
        return name, int(severity)
