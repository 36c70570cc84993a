"""The training step and what it needs: gradients, precision, BatchNorm, metrics, learning rates."""
