"""The training step: the order of operations around forward, backward and update."""
