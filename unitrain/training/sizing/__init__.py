"""The size of micro-batches and shares."""
