"""The launchers and other programs of this host."""
