"""Contract tests for authors of backends. ``unitrain conform --backend NAME`` runs them.

``pytest --pyargs unitrain.testing --backend NAME`` runs the same. Each test is one duty in one world: a backend on a
number of processes. ``unitrain.testing.ranks.run_ranks`` runs any function as the ranks of a job, for your own tests.
"""
