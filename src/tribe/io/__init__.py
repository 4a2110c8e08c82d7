"""Files: one container for tensors, one atomic writer, one lock."""
