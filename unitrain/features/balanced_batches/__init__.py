"""Batches that cost the same on all ranks, by the lengths of samples."""

from unitrain.features.balanced_batches.balance import BalancedBatches

__all__ = ["BalancedBatches"]
