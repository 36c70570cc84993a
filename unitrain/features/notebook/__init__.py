"""Training on several processes from a cell of a notebook."""
