"""Trains a small model in float64 with ``unitrain.init``, resumes, and writes the weights: ``trains.py FOLDER [STEP]``.

Rank 1 kills itself after ``STEP`` steps, unless it has done so before.
"""

import os
import signal
import socket
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import unitrain


def main(folder: Path, killed_at: int | None) -> None:
    with unitrain.init(seed=1, sync_batchnorm=True) as strategy:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(42, 5, dtype=torch.float64, generator=generator)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        model, optimizer = strategy.prepare(model, optimizer)
        data = strategy.dataloader(TensorDataset(rows, rows.sum(1, keepdim=True)), global_batch_size=8, shuffle=True)
        checkpoint = strategy.checkpoint(folder / "checkpoints", model=model, optimizer=optimizer, data=data)
        checkpoint.resume()
        for _ in data.epochs(3):
            for inputs, targets in data:
                strategy.step(mse_loss(model(inputs), targets), optimizer)
                once = folder / "killed"
                if strategy.rank == 1 and strategy.global_step == killed_at and not once.exists():
                    once.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            checkpoint.save()
        place = (strategy.launch.local_rank, strategy._job.node_rank, socket.gethostname())
        places = strategy.communicator.all_gather_object(place)
        said = {"backend": strategy.config.backend, "places": places, "world_size": strategy.world_size}
        strategy.save({"model": model, **said}, folder / "trained.pt")


main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
