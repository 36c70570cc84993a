"""What this machine has, and how to add Horovod to it."""
