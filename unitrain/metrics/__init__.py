"""Metrics: means over all ranks, synchronisation of torchmetrics, and throughput."""
