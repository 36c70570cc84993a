"""``unitrain bench``: measures how fast a recipe trains with each launcher and backend.

The recipe runs unchanged, in real processes. The strategy's own throughput is read in each of them.
"""
