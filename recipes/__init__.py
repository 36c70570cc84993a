"""Training scripts to run, read and copy; installed as ``unitrain.recipes``."""
