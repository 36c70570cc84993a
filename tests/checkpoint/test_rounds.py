"""Runs of rounds, in which models and loaders come and go: stopped anywhere, and resumed on other numbers of ranks."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Subset, TensorDataset

import unitrain
from unitrain import CheckpointError, Stopped, UsageError
from unitrain.errors import UnitrainError
from unitrain.job.watch.boundaries import Boundaries
from unitrain.job.watch.messages import BoundaryRequest
from unitrain.job.watch.stopping import RAISE_ERROR, SIGNAL, Stopping
from unitrain.pulse import Pulse

ROUNDS, EPOCHS, BATCH, MORE = 4, 2, 4, 3
INPUTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = INPUTS.sum(1, keepdim=True).sin()
Fault = tuple[int, int, int]
"""At which event, the signal, and the rank that gets it."""


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def plain(kind: str) -> Tensor:
    """Return the weights of a loop without UniTrain."""
    model, optimizer = made(0)
    pool, labels = list(range(6)), TARGETS
    for number in range(ROUNDS):
        if kind == "active":
            model, optimizer = made(number)
        elif kind == "whole":
            labels = (TARGETS + model(INPUTS).detach()) / 2
        for _, indices in itertools.product(range(EPOCHS), torch.tensor(pool).split(BATCH)):
            optimizer.zero_grad()
            mse_loss(model(INPUTS[indices]), labels[indices]).backward()
            optimizer.step()
        if kind == "active":
            rest = [index for index in range(len(INPUTS)) if index not in pool]
            pool += [rest[best] for best in model(INPUTS[rest]).flatten().topk(MORE).indices]
        elif kind == "self":
            labels = (TARGETS + model(INPUTS).detach()) / 2
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(folder: Path, backend: str, kind: str, fault: Fault | None = None) -> Tensor:
    """Train in rounds up to the end or the fault. Return the weights.

    Args:
        folder: of the checkpoints.
        backend: of the run.
        kind: "active": each round has a new model and its loader, and adds data. "self": one model, which labels the
            data of each round. Both are saved within a round. "whole": as "self", but a round is saved whole.
        fault: the failure.
    """
    copies = {"every": 1, "folder": str(folder / "memory")}
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=30, memory_copies=copies) as strategy:
        events = itertools.count()

        def event() -> None:
            if fault is not None and (next(events), strategy.rank) == fault[::2]:
                os.kill(os.getpid(), fault[1])
                time.sleep(0.3)  # until the watch has seen it

        def predicted(indices: list[int]) -> Tensor:
            loader = strategy.dataloader(Subset(TensorDataset(INPUTS), indices), global_batch_size=BATCH)
            outputs = []
            with strategy.evaluation(model):
                for (inputs,) in loader:
                    event()
                    outputs.append(strategy.gather(model(inputs), in_order=loader))
            return torch.cat(outputs)

        state: dict[str, Any] = {"round": 0, "pool": list(range(6)), "labels": TARGETS.clone()}
        lasting: dict[str, Any] = {"state": state}
        if kind != "active":
            model, optimizer = strategy.prepare(*made(0))
            lasting |= {"model": model, "optimizer": optimizer}
        checkpoint = strategy.checkpoint(folder / "run", partial=True, **lasting)
        checkpoint.resume()

        def train_round() -> None:
            for _ in loader.epochs(EPOCHS):
                for inputs, targets in loader:
                    event()
                    strategy.step(mse_loss(model(inputs), targets), optimizer)
                checkpoint.save()

        while state["round"] < ROUNDS:
            event()
            if kind == "whole":
                with checkpoint.round():
                    everything = list(range(len(INPUTS)))
                    state["labels"] = (TARGETS + predicted(everything)) / 2
                    data = Subset(TensorDataset(INPUTS, state["labels"]), state["pool"])
                    loader = strategy.dataloader(data, global_batch_size=BATCH)
                    train_round()
                    state["round"] += 1
                continue
            if kind == "active":
                model, optimizer = strategy.prepare(*made(state["round"]))
                checkpoint.add(model=model, optimizer=optimizer)
            data = Subset(TensorDataset(INPUTS, state["labels"]), state["pool"])
            loader = strategy.dataloader(data, global_batch_size=BATCH)
            checkpoint.add(loader=loader)
            train_round()
            with checkpoint.round():
                if kind == "active":
                    rest = [index for index in range(len(INPUTS)) if index not in state["pool"]]
                    state["pool"] += [rest[best] for best in predicted(rest).flatten().topk(MORE).indices]
                    if state["round"] < ROUNDS - 1:
                        checkpoint.remove("model", "optimizer", "loader")
                else:
                    state["labels"] = (TARGETS + predicted(list(range(len(INPUTS))))) / 2
                    checkpoint.remove("loader")
                state["round"] += 1
        return torch.cat([strategy.full_tensor(p.detach()).flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("kind", "backend", "seed"),
    [
        *(("active", "ddp", seed) for seed in range(3)),
        *(("self", "ddp", seed) for seed in range(2)),
        *(("whole", "ddp", seed) for seed in range(2)),
        ("active", "horovod", 3),
        ("whole", "fsdp", 2),
    ],
)
def test_rounds_disturbed_at_random_moments_end_with_the_weights_of_a_plain_loop(
    tmp_path: Path, kind: str, backend: str, seed: int
) -> None:
    moments = random.Random(seed)
    for number, nprocs in ((signal.SIGKILL, 2), (signal.SIGTERM, 3 if backend == "ddp" else 2)):
        fault = moments.randrange(2, 20), number, moments.randrange(nprocs)
        with pytest.raises((Stopped, UnitrainError)):
            run_ranks(train, tmp_path, backend, kind, fault, nprocs=nprocs)
    for weights in run_ranks(train, tmp_path, backend, kind, nprocs=2 if backend == "ddp" else 1):
        torch.testing.assert_close(weights, plain(kind), rtol=0, atol=1e-9)
