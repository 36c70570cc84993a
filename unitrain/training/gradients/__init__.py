"""Gradients: buckets, reduction, checks and clipping."""
