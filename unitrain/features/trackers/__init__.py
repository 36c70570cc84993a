"""Trackers: TensorBoard, Weights & Biases and MLflow behind one protocol, on rank 0 only."""

from unitrain.features.trackers.libraries import TrackerName
from unitrain.features.trackers.trackers import Tracker, Trackers

__all__ = ["Tracker", "TrackerName", "Trackers"]
