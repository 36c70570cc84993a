"""Imported last by the server that forks ranks: collections in the ranks leave out what it has imported.

To look through it takes 0.3 s, and copies all of it into the memory of the rank.
"""

import gc

gc.collect()
gc.freeze()
