"""Parts of gan.py."""
