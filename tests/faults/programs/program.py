"""The program of the fault tests: trains a small model for a number of steps, with a fault on the way.

    python program.py FOLDER STEPS [KIND:RANK:STEP | KIND:RANK:PLACE]

It is an ordinary script, except for its log (a line per micro-batch and rank) and its fault, which comes once, and not
again when the job is restarted. A place is a collective outside of steps: init, prepare, evaluation or close. The other
ranks are already in it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import unitrain

SAMPLES, GLOBAL_BATCH, EPOCHS = 101, 12, 8


class Noisy(Dataset[tuple[int, Tensor, Tensor]]):
    """Sample i is a point, with new noise each time."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x = torch.linspace(-1, 1, SAMPLES, dtype=torch.float64)[index]
        inputs = torch.stack([x, x**2, x**3]) + 0.1 * torch.randn(3, dtype=torch.float64)
        return index, inputs, torch.sin(3 * x).reshape(1)


def _spin() -> None:
    while True:
        pass


def _set_clock() -> None:
    """Set the clock forward by an hour, as Python sees it."""
    now, now_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: now() + 3600, lambda: now_ns() + 3600 * 10**9


OPEN: dict[str, Any] = {}
# What a rank can do to the others. Those that return go on training.
FAULTS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "raise": lambda: os.environ["A USER'S MISTAKE"],
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": _spin,
    "hold-gil": lambda: ctypes.PyDLL(None).sleep(1000),
    "exit": lambda: sys.exit(0),
    "os-exit": lambda: os._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "usr1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "thread": threading.Thread(target=time.sleep, args=(1000,), name="uploader").start,
    "exit-handler": lambda: atexit.register(time.sleep, 1000),
    "clock": _set_clock,
    "barrier": lambda: OPEN["strategy"].barrier(),
    "save": lambda: OPEN["checkpoint"].save(),
}


RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "SLURM_PROCID")
RANK = int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), 0))


def main(folder: Path, last_step: int, kind: str, rank: int, at: str) -> None:
    pause = float(os.environ.get("TESTS_PAUSE", "0"))

    def come_to(place: str) -> None:
        if at == place and rank == RANK and not (folder / "fault").exists():
            time.sleep(0 if place.isdigit() else 1.5)
            (folder / "fault").write_text(str(time.time()))
            FAULTS[kind]()

    come_to("init")
    strategy = unitrain.init(precision="fp64", accumulate=2, seed=7)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    come_to("prepare")
    model, optimizer = strategy.prepare(model, optimizer)
    loader = strategy.dataloader(Noisy(), global_batch_size=GLOBAL_BATCH, shuffle=True)
    checkpoint = strategy.checkpoint(folder / "checkpoints", model=model, optimizer=optimizer, loader=loader)
    OPEN.update(strategy=strategy, checkpoint=checkpoint)
    checkpoint.resume()
    strategy.print(f"began after step {strategy.global_step}", file=sys.stderr)
    if strategy.global_step == last_step:  # it was killed after its last save
        strategy.close()
        return
    with (folder / f"{strategy.global_step}.{strategy.rank}.notes").open("w") as notes:
        for epoch in loader.epochs(EPOCHS):
            for ids, inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                note = {
                    "epoch": epoch,
                    "step": strategy.global_step,
                    "ids": ids.tolist(),
                    "loss": loss.item() * len(ids),
                }
                if len(ids):
                    notes.write(json.dumps(note) + "\n")
                    notes.flush()
                before = strategy.global_step
                strategy.step(loss, optimizer)
                if strategy.global_step > before:
                    time.sleep(pause)
                    come_to(str(strategy.global_step))
                    if strategy.global_step % 5 == 0:
                        checkpoint.save()
                if strategy.global_step == last_step:
                    break
            if strategy.global_step == last_step:
                break
    checkpoint.save()
    with strategy.evaluation(model):
        come_to("evaluation")
        strategy.all_reduce(model(inputs).detach().sum())
    come_to("close")
    strategy.close()


if __name__ == "__main__":
    kind, rank, at = (sys.argv[3] if len(sys.argv) > 3 else "none:0:0").split(":")
    main(Path(sys.argv[1]), int(sys.argv[2]), kind, int(rank), at)
