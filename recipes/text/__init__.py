"""Parts of language_model.py."""
