"""The fifteen corruptions of ImageNet-C and CIFAR-C.

Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations", ICLR 2019.
`table` holds the parameters of CIFAR-C, `large` those of ImageNet-C. Where the benchmark rounds to 8-bit images inside
a corruption, so do these. The benchmark then stores the result times 255, truncated (ImageNet-C: as JPEG of quality
85); the caller does that.

Shapes: N images, C channels, H rows, W columns, P = H W pixels; x (N, C, H, W) in [0, 1].
"""

import importlib

for _module in ("noise", "blur", "weather", "digital"):  # `names("common")` has this order, the benchmark's
    importlib.import_module(f"{__name__}.{_module}")
