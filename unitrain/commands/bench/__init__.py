"""``unitrain bench``: measures how fast a recipe trains with each launcher and backend, and tunes its settings.

The recipe runs unchanged, in real processes. Each process records when its steps end (``recording``). The command reads
the records, tries settings in the fastest world, and writes the fastest configuration.
"""
