"""Supervision of a job's processes, outside the training step: handshake, heartbeats, stopping, errors, restarts."""
