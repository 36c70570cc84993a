"""Checkpoints that a failure leaves."""
