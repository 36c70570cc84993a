"""Optimizers: sharded state, averaged weights."""
