"""Training with UniTrain that may be restarted: ``with_unitrain.py FOLDER PAUSE``. It saves no checkpoint by itself.

Rank 0 adds a line to ``FOLDER/steps.jsonl`` after each step. A step lasts at least PAUSE seconds.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unitrain

folder, pause = Path(sys.argv[1]), float(sys.argv[2])
with unitrain.init(device="cpu") as strategy, (folder / "steps.jsonl").open("a", buffering=1) as lines:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model, optimizer = strategy.prepare(model, torch.optim.Adam(model.parameters()))
    drawn = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(4096, 64, generator=drawn), torch.randint(10, (4096,), generator=drawn))
    loader = strategy.dataloader(data, global_batch_size=64, shuffle=True)
    checkpoint = strategy.checkpoint(folder / "checkpoints", model=model, optimizer=optimizer, loader=loader)
    checkpoint.resume()
    for _ in loader.epochs(1000):
        for inputs, labels in loader:
            strategy.step(nn.functional.cross_entropy(model(inputs), labels), optimizer)
            if strategy.is_main:
                made = {"time": time.time(), "step": strategy.global_step, "pid": os.getpid()}
                lines.write(json.dumps({**made, "ranks": strategy.world_size}) + "\n")
            time.sleep(pause)
