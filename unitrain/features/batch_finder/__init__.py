"""The batch finder: halves the micro-batch until it fits into the memory of every rank."""

from unitrain.features.batch_finder.finder import find_micro_batch_size

__all__ = ["find_micro_batch_size"]
