"""Checkpoints: how long saving one blocks training, and how long until it is on disk.

    python benchmarks/checkpoints.py

ResNet-50's 161 tensors and SGD's momentum, 204 MB, on one process. ``strategy.checkpoint`` in the foreground and in the
background, compared with ``torch.save``, alone and followed by fsync, and torch's distributed checkpoint, ``save`` and
``async_save``. UniTrain writes checksums and waits for the disk (fsync) before a checkpoint is valid. The distributed
checkpoint waits, but has no checksums; ``torch.save`` does neither. Each has been written to disk before the next one
begins.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import unitrain
from shared.processes import ALONE, in_processes
from shared.report import Found, run, table
from shared.rounds import Way, compared, shown_ratio, turns
from shared.workloads import OnlyParameters, resnet50_shapes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYNC, ASYNC = "UniTrain, background=False", "UniTrain, background=True"
TORCH, SYNCED = "torch.save", "torch.save and fsync"
DCP, DCP_ASYNC = "torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save"
ROUNDS, SHORT_ROUNDS = 7, 2
ALLOWED_STALL = 0.1  # of a synchronous save
ALLOWED_SAVE = 1.2  # of torch.save and fsync

Train = Callable[[], object]


class Saving:
    """A model, its optimizer, and each way to save both.

    A way is a pair of functions: one returns when training may continue, one when the state is on the disk.
    """

    def __init__(self, strategy: unitrain.Strategy, small: bool, folder: Path) -> None:
        self.strategy, self.folder = strategy, folder
        model = OnlyParameters([(64,)] if small else resnet50_shapes())
        self.model, self.optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def train(self) -> None:
        """Train for one step."""
        self.strategy.step(self.model(torch.ones(())), self.optimizer)

    @contextmanager
    def way(self, name: str) -> Iterator[tuple[Way, Way]]:
        """Yield the functions of a way, and remove its files afterwards."""
        path = self.folder / "saved"
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        futures: list[Any] = []
        if name in (SYNC, ASYNC):
            objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
            checkpoint = self.strategy.checkpoint(path, background=name == ASYNC, **objects)
            yield checkpoint.save, checkpoint.wait
            checkpoint.close()
        elif name == TORCH:
            path.mkdir()
            yield lambda: torch.save(state, path / "state.pt"), lambda: None
        elif name == SYNCED:
            path.mkdir()
            yield lambda: save_and_sync(state, path / "state.pt"), lambda: None
        elif name == DCP:
            yield lambda: save_distributed(state, checkpoint_id=path), lambda: None
        else:
            yield lambda: futures.append(async_save(state, checkpoint_id=path)), lambda: futures[0].result()
        shutil.rmtree(path)
        os.sync()


def save_and_sync(state: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def measure_saving(rounds: int, small: bool) -> Found:
    """Measure each way's stall and total."""
    stalls: dict[str, list[float]] = {name: [] for name in (SYNC, ASYNC, TORCH, SYNCED, DCP, DCP_ASYNC)}
    totals: dict[str, list[float]] = {name: [] for name in stalls}
    with (
        unitrain.init(device="cpu", threads_per_process=1) as strategy,
        tempfile.TemporaryDirectory() as folder,
    ):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # async_save needs it
        saving = Saving(strategy, small, Path(folder))
        for counts, name in turns(list(stalls), rounds):
            saving.train()
            with saving.way(name) as (save, wait):
                start = time.perf_counter()
                save()
                stall = time.perf_counter() - start
                wait()
                total = time.perf_counter() - start
            if counts:
                stalls[name].append(stall)
                totals[name].append(total)
        dist.destroy_process_group()
    return {"stalls": compared(stalls, SYNC), "totals": compared(totals, SYNC)}


def measure(short: bool) -> Found:
    return dict(in_processes(ALONE, measure_saving, rounds=SHORT_ROUNDS if short else ROUNDS, small=short))


def tables(found: Found) -> str:
    rows = [
        [
            name, f"{one['seconds'] * 1e3:.1f}", shown_ratio(one), f"{found['totals'][name]['seconds'] * 1e3:.1f}",
            shown_ratio(found["totals"][name]),
        ]
        for name, one in found["stalls"].items()
    ]  # fmt: skip
    head = ["way", "stall, ms", "beside the first (quartiles)", "on the disk, ms", "beside the first (quartiles)"]
    stall = found["stalls"][ASYNC]["ratio"]
    kept = "kept" if stall <= ALLOWED_STALL else "NOT KEPT"
    save = 1 / found["stalls"][SYNCED]["ratio"]
    kept_too = "kept" if save <= ALLOWED_SAVE else "NOT KEPT"
    return (
        f"{table(head, rows)}\nA save in the background may stall training for {ALLOWED_STALL:.0%} of one in the "
        f"foreground: {kept} ({stall:.1%}). One in the foreground may take {ALLOWED_SAVE} times as long as "
        f"torch.save and fsync: {kept_too} ({save:.2f})."
    )


def plot(found: Found, figure: Figure) -> None:
    axis = figure.subplots()
    names = list(found["stalls"])
    for i, (part, label) in enumerate((("totals", "until it is on the disk"), ("stalls", "training stands still"))):
        axis.barh(names, [found[part][name]["seconds"] * 1e3 for name in names], label=label, color=f"C{1 - i}")
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.legend()
    figure.set_size_inches(9, 3.5)


if __name__ == "__main__":
    run(measure, tables, plot)
