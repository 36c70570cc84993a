"""Metrics: means over all ranks, and synchronisation of torchmetrics."""
