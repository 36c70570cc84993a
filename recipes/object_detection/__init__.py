"""Parts of detection.py."""
