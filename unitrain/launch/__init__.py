"""Launcher detection and the rendezvous of the processes."""
