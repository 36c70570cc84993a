"""A minimal training script with UniTrain, for any launcher: ``on_strategy.py FILE``.

Rank 0 writes the time after its first step into the file.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import unitrain

strategy = unitrain.init(device="cpu")
model = nn.Linear(64, 10)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

loss = model(torch.randn(32, 64)).square().mean()
strategy.step(loss, optimizer)
if strategy.is_main:
    Path(sys.argv[1]).write_text(str(time.time()))
