"""What adapting costs, measured: ``python -m benchmarks --help``."""
