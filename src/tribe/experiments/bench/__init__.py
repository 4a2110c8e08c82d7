"""Measure what adapting costs, side by side with plain inference; ``tribe bench`` is the command.

    net = contenders.build("resnet20")  # or any classifier
    result = measurement.measure(net, measurement.Setting("resnet20", (3, 32, 32), classes=10))
    print(results.show(result))

Compare the ratios: to plain inference of the same network, and to matrix products that are timed in the same turns.
"""
