"""The horovod backend."""
