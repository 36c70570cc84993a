"""Checkpoints of sharded state."""
