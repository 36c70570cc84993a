"""Parts of speaker.py."""
