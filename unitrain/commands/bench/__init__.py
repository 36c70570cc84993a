"""``unitrain bench``: how fast does a user's own recipe train in each world of this machine, and with which settings?

The recipe runs as it is, in real processes. Each of them writes down when its steps ended (``recording``); the command
reads that, tries settings on the fastest world, and writes down the configuration that it would take.
"""
