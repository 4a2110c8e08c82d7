"""The study of the time filter."""
