"""Checkpoints of sharded state, in the format of torch.distributed.checkpoint."""
