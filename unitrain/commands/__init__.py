"""The subcommands of ``unitrain``."""
