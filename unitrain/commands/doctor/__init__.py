"""``unitrain doctor``: shows what this host has for distributed training, and how to install what is missing."""
