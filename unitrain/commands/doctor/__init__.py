"""``unitrain doctor``: shows the parts of this host that distributed training needs, and how to install others."""
