"""What the package itself has no use for: the yardstick of `tribe bench`, and measurements that are made now and then.

``python -m benchmarks`` is ``tribe bench`` with the released structure among the contenders; ``.growth`` watches a long
run, ``.classes`` the price of more classes, ``.operations`` counts launches without a GPU, ``.methods`` makes
docs/methods.md, ``.gpu_session`` measures everything there is to measure on a GPU.
"""
