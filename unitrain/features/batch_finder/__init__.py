"""The batch finder: halves the micro-batch until it fits into the memory of every rank."""
