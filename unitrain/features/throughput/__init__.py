"""How fast a run trains, and where its time goes."""

from unitrain.features.throughput.throughput import Throughput

__all__ = ["Throughput"]
