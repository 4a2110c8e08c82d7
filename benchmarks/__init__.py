"""Measurements of speed and memory that the package does not need.

``python -m benchmarks`` is ``tribe bench`` with the structure of the released code among the contenders. ``.growth``
measures a long run, ``.peak`` the memory of a step, ``.classes`` more classes, ``.packed`` packed states, ``.fleet``
many streams, ``.serve`` and ``.overload`` the server, ``.load`` a busy machine, and ``.file_streams`` images in
files. ``.operations`` counts launches without a GPU, and ``.gpu_session`` and ``.resnet50`` measure a GPU.
"""
