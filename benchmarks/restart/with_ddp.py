"""Training with DDP that may be restarted: ``with_ddp.py FOLDER PAUSE EVERY TIMEOUT``.

It saves a checkpoint every EVERY steps, and gives a collective up after TIMEOUT seconds. Rank 0 adds a line to
``FOLDER/steps.jsonl`` after each step. A step lasts at least PAUSE seconds.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

folder, pause, every, timeout = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.Adam(model.parameters())
drawn = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(4096, 64, generator=drawn), torch.randint(10, (4096,), generator=drawn))
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
loader = DataLoader(data, batch_size=64 // ranks, sampler=sampler)
step, saved = 0, folder / "saved.pt"
if saved.exists():
    state = torch.load(saved)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
with (folder / "steps.jsonl").open("a", buffering=1) as lines:
    for epoch in range(1000):  # from the start of an epoch: a DistributedSampler can't begin in the middle
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0:
                made = {"time": time.time(), "step": step, "pid": os.getpid(), "ranks": ranks}
                lines.write(json.dumps(made) + "\n")
                if step % every == 0:
                    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, saved.with_suffix(".new"))
                    saved.with_suffix(".new").replace(saved)
            time.sleep(pause)
