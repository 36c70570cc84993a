"""The base of the backends on torch.distributed."""
