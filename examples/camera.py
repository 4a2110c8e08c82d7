"""Adapt inside an inference loop, stop, and resume: ``python examples/camera.py``.

The camera here shows real digits through noise and blur. In your program, `frames` is your camera and `net` is your
network; nothing else changes.
"""

import tempfile
from pathlib import Path

import tribe

data = tribe.datasets.create("live-mnist-c", corruptions=("impulse_noise", "motion_blur", "canny_edges"))
frames = list(tribe.Stream(data, tribe.scenarios.create("gli-f", imbalance=300), seeds=(0,), batch=64))
net = tribe.models.load("compact", tribe.models.find("compact", "mnist", "."))

with tempfile.TemporaryDirectory() as folder:
    state = Path(folder) / "camera.safetensors"
    wrong = {"as it was trained": 0, "adapting": 0}
    model = tribe.adapt(net)
    for step, frame in enumerate(frames):
        images, labels = frame.x[0], frame.y[0]  # of the only stream; labels are used for the score alone
        wrong["adapting"] += int((model(images).argmax(-1) != labels).sum())
        wrong["as it was trained"] += int((net(images).argmax(-1) != labels).sum())
        if step == len(frames) // 2:
            model.save(state)  # the program stops here ...
            model = tribe.load(state, net)  # ... and resumes here
    seen = model.info[0]

total = sum(frame.y.numel() for frame in frames)
for name, count in wrong.items():
    print(f"{name:18} {100 * count / total:5.1f} % of {total:,} images wrong")
print(f"images learned from: {seen.images:,}, skipped: {seen.skipped}, distance from the source: {seen.distance:.3f}")
