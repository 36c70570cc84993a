"""Trackers: TensorBoard, Weights & Biases and MLflow behind one protocol, on rank 0 only."""

from unitrain.tracking.libraries import TrackerName
from unitrain.tracking.trackers import Tracker, Trackers

__all__ = ["Tracker", "TrackerName", "Trackers"]
