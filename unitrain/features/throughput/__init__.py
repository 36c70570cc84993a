"""How fast a run trains, and where its time goes."""

from unitrain.features.throughput.throughput import Throughput, Totals

__all__ = ["Throughput", "Totals"]
