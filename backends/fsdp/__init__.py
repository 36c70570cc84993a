"""The fsdp backend."""
