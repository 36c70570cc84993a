"""The contract of a backend, for authors of backends: what ``unitrain conform --backend NAME`` runs.

``pytest --pyargs unitrain.testing --backend NAME`` runs the same, with all of pytest's options. Each test is one duty
in one world: a backend on so many processes. ``unitrain.testing.ranks.run_ranks`` runs any function as the ranks of a
job, for tests of your own.
"""
