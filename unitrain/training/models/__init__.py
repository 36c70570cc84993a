"""Models: preparation, precision, buffers and checks."""
