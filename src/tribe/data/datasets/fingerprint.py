"""A hash of the images on the disk: two copies of a data set may have the same name and other images."""

import hashlib

import torch

from tribe.data.datasets import Dataset, optional

SAMPLED = 16  # images per domain; another draw of the noise, or another archive, changes all of them


def fingerprint(dataset: Dataset) -> str:
    """32 hexadecimal digits that identify the labels and images of every domain.

    If the data set has a method ``digest(domain)`` and it returns a hash, that is used. Otherwise a few images are
    read, evenly spaced in the domain. A data set that corrupts images while they are read has the fingerprint of the
    clean images: its fields say the rest, and the last bit of a corrupted pixel may differ between machines.
    """
    clean = optional(dataset, "clean")
    if clean is not None:
        return fingerprint(clean)
    digest_of = optional(dataset, "digest")
    result = hashlib.sha256()
    for domain in dataset.domains:
        labels, digest = dataset.labels(domain), digest_of(domain)
        result.update(f"{domain} {len(labels)} {digest}".encode() + labels.numpy().tobytes())
        if digest is None and len(labels):
            sample = torch.linspace(0, len(labels) - 1, min(SAMPLED, len(labels))).long()
            levels = (255 * dataset.images(domain, sample)).round().nan_to_num(-1).to(torch.int16)  # unreadable: NaN
            result.update(f"{tuple(levels.shape)}".encode() + levels.numpy().tobytes())
    return result.hexdigest()[:32]
