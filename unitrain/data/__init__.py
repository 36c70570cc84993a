"""Data loading: shards a dataset over the ranks, each sample once per epoch, in an order independent of the world."""

from unitrain.data.loader import Loader

__all__ = ["Loader"]
