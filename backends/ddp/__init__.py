"""The ddp backend."""
