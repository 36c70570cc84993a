"""Folders of checkpoints, on a disk or in an object store."""
