"""BatchNorm over the global batch."""
