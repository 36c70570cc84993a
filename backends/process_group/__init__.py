"""What the backends on torch.distributed share."""
