"""Copies of a run's state in the memory of its hosts, from which a killed job resumes."""
