"""Training on several processes from a cell of a notebook."""

from unitrain.features.notebook.launching import notebook_launch

__all__ = ["notebook_launch"]
