"""Accumulation windows: the losses of a window and their weights, and what each optimizer accumulates."""
