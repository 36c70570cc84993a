"""Checkpoints that are whole or not there: written atomically, verified on reading, resumed on any world."""

from unitrain.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
