"""Train, and raise on the last rank at the third step: ``raises.py FILE [BACKEND]``. FILE gets the time of it."""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import unitrain

raised, backend = [*sys.argv[1:], "auto"][:2]
strategy = unitrain.init(backend=backend)
samples = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
model = torch.nn.Linear(4, 2)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step, (rows, labels) in enumerate(strategy.dataloader(samples, global_batch_size=8), 1):
    if step == 3 and strategy.rank == strategy.world_size - 1:
        Path(raised).write_text(str(time.time()))
        raise RuntimeError("the disk is on fire")
    strategy.step(F.cross_entropy(model(rows), labels), optimizer)
print("trained to the end")
