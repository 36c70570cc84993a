"""What a run measures: means over all ranks, torchmetrics' objects, and throughput."""
