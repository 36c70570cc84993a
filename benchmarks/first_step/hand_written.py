"""A minimal hand-written training script for a backend: ``hand_written.py BACKEND FILE``.

Rank 0 writes the time after its first step into the file.
"""

import os
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

backend, stamp = sys.argv[1:]
rank = 0
if backend == "ddp":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
elif backend == "horovod":
    hvd = import_module("horovod.torch")
    hvd.init()
    rank = hvd.rank()
model: nn.Module = nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if backend == "ddp":
    model = DistributedDataParallel(model)
elif backend == "horovod":
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

loss = model(torch.randn(32, 64)).square().mean()
loss.backward()
optimizer.step()
if rank == 0:
    Path(stamp).write_text(str(time.time()))
if backend == "ddp":
    # The time is taken, and torch aborts some runs at their exit, of eight processes more than of two.
    dist.barrier()
    os._exit(0)
