"""Accumulation windows: the losses of a window, their weights, and the gradients of each optimizer."""
