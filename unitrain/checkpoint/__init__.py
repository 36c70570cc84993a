"""Checkpoints: written atomically, verified when read, and resumed with any world size."""

from unitrain.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
