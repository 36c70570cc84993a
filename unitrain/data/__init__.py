"""Each process's share of a dataset: each sample exactly once, in an order that no world changes."""

from unitrain.data.loader import Loader

__all__ = ["Loader"]
