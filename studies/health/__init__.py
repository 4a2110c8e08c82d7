"""The study of the estimate of accuracy."""
