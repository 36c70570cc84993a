"""Averages of a model's weights, with which it can be evaluated and exported."""

from unitrain.features.ema.ema import EMA

__all__ = ["EMA"]
