"""Checkpoints: how long saving one blocks training, and how long until it is on disk; and copies in memory.

    python benchmarks/checkpoints.py

ResNet-50's 161 tensors and SGD's momentum, 204 MB, on one process. ``strategy.checkpoint`` in the foreground and in the
background, compared with ``torch.save``, alone and followed by fsync, and torch's distributed checkpoint, ``save`` and
``async_save``. UniTrain writes digests (XXH3-128) and waits for the disk (fsync) before a checkpoint is valid. The
distributed checkpoint waits, but has no digests; ``torch.save`` has CRC-32, which ``torch.load`` does not read, and
does not wait. Each saves once before, since the first copy takes new memory, and is on the disk before the next begins.

The stall of a save in the background is compared with a copy of the same tensors into buffers that are in use; the time
until a checkpoint is on the disk, with ``torch.save`` and fsync.

Copies in memory are those of two processes after each step. The time until one is written includes XXH3-128 of every
byte, but no fsync. A host keeps two, and one that is being copied.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torchvision.models import resnet50

import unitrain
from shared.processes import ALONE, GLOO, in_processes, startable
from shared.report import Found, run, table
from shared.rounds import Way, compared, shown_ratio, turns
from shared.workloads import OnlyParameters, resnet50_shapes
from unitrain.communication.structure import tensors
from unitrain.features.memory_copies.copies import MemoryCopies, steps_between

SYNC, ASYNC = "UniTrain, background=False", "UniTrain, background=True"
TORCH, SYNCED = "torch.save", "torch.save and fsync"
DCP, DCP_ASYNC = "torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save"
COPY = "a copy between warm buffers"
ROUNDS, SHORT_ROUNDS = 9, 2
ALLOWED_STALL = 1.2  # of a copy between warm buffers
ALLOWED_SAVE = 1.05  # of torch.save and fsync
WHATS = ("stalls", "totals")


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
        path.mkdir()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        futures: list[Any] = []
        number = itertools.count()
        if name in (SYNC, ASYNC):
            objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
            checkpoint = self.strategy.checkpoint(path, background=name == ASYNC, **objects)
            yield checkpoint.save, checkpoint.wait
            checkpoint.close()
        elif name == COPY:
            pairs = [(torch.zeros_like(tensor), tensor) for tensor in tensors(state)]
            yield lambda: [warm.copy_(tensor) for warm, tensor in pairs], lambda: None
        elif name == TORCH:
            yield lambda: torch.save(state, path / f"{next(number)}.pt"), lambda: None
        elif name == SYNCED:
            yield lambda: save_and_sync(state, path / f"{next(number)}.pt"), lambda: None
        elif name == DCP:
            yield lambda: save_distributed(state, checkpoint_id=path / f"{next(number)}"), lambda: None
        else:

            def start() -> None:
                futures.append(async_save(state, checkpoint_id=path / f"{next(number)}"))

            yield start, lambda: futures[-1].result()
        shutil.rmtree(path)
        os.sync()


def save_and_sync(state: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def measure_saving(rounds: int, small: bool) -> Found:
    """Measure each way's stall and total."""
    stalls: dict[str, list[float]] = {name: [] for name in (SYNC, ASYNC, COPY, TORCH, SYNCED, DCP, DCP_ASYNC)}
    totals: dict[str, list[float]] = {name: [] for name in stalls}
    with (
        unitrain.init(device="cpu") as strategy,
        tempfile.TemporaryDirectory() as folder,
    ):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # async_save needs it
        saving = Saving(strategy, small, Path(folder))
        for counts, name in turns(list(stalls), rounds):
            with saving.way(name) as (save, wait):
                saving.train()
                save()
                wait()
                os.sync()
                saving.train()
                start = time.perf_counter()
                save()
                stall = time.perf_counter() - start
                wait()
                total = time.perf_counter() - start
            if counts:
                stalls[name].append(stall)
                totals[name].append(total)
        dist.destroy_process_group()
    del totals[COPY]
    return {"stalls": compared(stalls, COPY), "totals": compared(totals, SYNCED)}


COPIES, SHORT_COPIES = 5, 2
INPUTS = {"MLP (64-64-10)": (8, 64), "ResNet-50, SGD": (2, 3, 32, 32)}


def _resnet50() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = resnet50()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _gigabyte() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = OnlyParameters([(2**20,)] * 80)
    return model, torch.optim.Adam(model.parameters())


def _small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "MLP (64-64-10)": _small,
    "ResNet-50, SGD": _resnet50,
    "1 GB, Adam": _gigabyte,
}


def measure_model(name: str, rounds: int) -> Found | None:
    """Measure copies in memory of a model. Return what rank 0 has found."""
    with unitrain.init(device="cpu", memory_copies={"every": 10**9}) as strategy:
        torch.set_num_threads(1)
        model, optimizer = strategy.prepare(*MODELS[name]())
        folder = Path(strategy.on_main(tempfile.mkdtemp))
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        [memory] = (hook for hook in checkpoint._hooks if isinstance(hook, MemoryCopies))
        inputs = torch.ones(()) if name == "1 GB, Adam" else torch.randn(*INPUTS[name])
        steps, copies, written = [], [], []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            strategy.step(model(inputs).square().mean(), optimizer)
            steps.append(time.perf_counter() - start)
            copy, whole = measure_copy(memory)
            copies.append(copy)
            written.append(whole)
        size = bytes_of(memory) if strategy.is_main else 0
        checkpoint.close()
        strategy.on_main(lambda: shutil.rmtree(folder))
    # The first copy takes new memory.
    step_s, copy_s, written_s = (statistics.median(seconds[1:]) for seconds in (steps, copies, written))
    copied = {"model": name, "bytes": size, "step_s": step_s, "copy_s": copy_s, "written_s": written_s}
    return copied if size else None


def bytes_of(memory: MemoryCopies) -> int:
    """Return the size of the last copy on this host."""
    assert memory._store is not None
    return sum(file.stat().st_size for file in (memory._store.disk.root / memory._newest).iterdir())


def measure_copy(memory: MemoryCopies) -> tuple[float, float]:
    """Return how long a copy in memory stalls training, and until it is written. Collective."""
    memory._next = 0
    start = time.perf_counter()
    memory.at_boundary()
    stall = time.perf_counter() - start
    assert memory._background is not None
    memory._background.wait()
    return stall, time.perf_counter() - start


def measure(short: bool) -> Found:
    saving = in_processes(ALONE, measure_saving, rounds=SHORT_ROUNDS if short else ROUNDS, small=short)
    names, rounds = (list(MODELS)[:1], SHORT_COPIES) if short else (list(MODELS), COPIES)
    return {
        **saving,
        "copies": [
            in_processes(world, measure_model, name=name, rounds=rounds) for world in startable(GLOO) for name in names
        ],
    }


def tables(found: Found) -> str:
    saving = [
        [name, *(_shown(found[what][name]) if name in found[what] else "" for what in WHATS)]
        for name in found["stalls"]
    ]
    copies = [
        [
            case["model"],
            f"{case['bytes'] / 1e6:,.1f}",
            f"{case['copy_s'] * 1e3:.1f}",
            f"{case['written_s'] * 1e3:.0f}",
            f"{steps_between(case['copy_s'] / case['step_s'])}",
        ]
        for case in found["copies"]
    ]
    head = ["model", "MB", "stall, ms", "written, ms", "steps between copies, for 1%"]
    return "\n".join(
        [
            table(["way", "stall, ms", "on the disk, ms"], saving),
            _limits(found),
            "**Copies in memory**\n",
            table(head, copies),
        ]
    )


def _limits(found: Found) -> str:
    stall, save = found["stalls"][ASYNC]["ratio"], found["totals"][SYNC]["ratio"]
    kept, kept_too = ("kept" if one else "NOT KEPT" for one in (stall <= ALLOWED_STALL, save <= ALLOWED_SAVE))
    return (
        f"Ratios of stalls are to {COPY}, others to {SYNCED}. A save in the background may stall training "
        f"{ALLOWED_STALL} times as long as such a copy: {kept} ({stall:.2f}). One in the foreground may take "
        f"{ALLOWED_SAVE} times as long as {SYNCED}: {kept_too} ({save:.2f}).\n"
    )


def _shown(case: Found) -> str:
    return f"{case['seconds'] * 1e3:.0f}: {shown_ratio(case)}"


if __name__ == "__main__":
    run(measure, tables)
