"""Files of weights."""
