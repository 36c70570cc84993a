"""The training step: backward, gradient averaging, precision, BatchNorm, and preparation of modules."""
