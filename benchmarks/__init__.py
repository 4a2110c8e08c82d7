"""Measurements that the package does not need: a reference implementation to compare with, and occasional studies.

``python -m benchmarks`` is ``tribe bench`` with the structure of the released code among the contenders. ``.growth``
measures time and memory over a long run, ``.classes`` the cost of more classes, ``.operations`` counts launches without
a GPU, ``.textbook`` compares TENT with a plain PyTorch version, ``.methods`` generates docs/methods.md, and
``.gpu_session`` measures everything on a GPU.
"""
