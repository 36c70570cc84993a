"""``unitrain doctor``: shows what hosts have for distributed training, and how to install what is missing."""
