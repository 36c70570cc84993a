"""Samples a second onto the device: a strategy's loader beside a bare DataLoader with the same settings.

    python benchmarks/loading.py

Whole epochs, shuffled, in turns in one process, with no workers and with two that stay. ``rows`` are samples that cost
next to nothing, so that the loader's own work shows; ``images`` are cropped, flipped and normalised. By default ours
gives each sample random numbers of its own, which no DataLoader does, so it is measured without that too. Without
workers it is the process's CPU time that counts, with workers the clock's. How fast an epoch starts and seeks is what
``sampler.py`` measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import unitrain
from shared.processes import ALONE, in_processes
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, shown_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BARE, OURS, UNSEEDED = "bare DataLoader", "UniTrain", "UniTrain, sample_seeding=False"
WORKERS = (0, 2)
# Samples of an epoch, and of a batch.
SIZES, SHORT_SIZES = {"rows": (50_000, 256), "images": (2_000, 64)}, {"rows": (512, 256), "images": (128, 64)}
ROUNDS, SHORT_ROUNDS = 9, 2


class Rows(Dataset[tuple[Tensor, int]]):
    """64 numbers and a class."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randn(length, 64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], index % 10


class Images(Dataset[tuple[Tensor, int]]):
    """An image of 3 x 64 x 64, cropped at random to 56 x 56, flipped at random, and normalised."""

    def __init__(self, length: int) -> None:
        self.images = torch.randint(256, (length, 3, 64, 64), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = torch.randint(9, (2,)).tolist()
        image = self.images[index, :, top : top + 56, left : left + 56]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image.float().div_(255).sub_(0.5).div_(0.25), index % 10


def measure_loaders(data: str, samples: int, batch: int, workers: int, rounds: int) -> Found:
    """Measure each way over whole epochs."""
    dataset = {"rows": Rows, "images": Images}[data](samples)
    kept: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:

        def epoch(loader: Iterable[Any], move: Callable[[Tensor], Tensor] | None = None) -> Way:
            def read() -> None:
                seen = 0
                for inputs, targets in loader:
                    if move is not None:
                        inputs, targets = move(inputs), move(targets)
                    seen += len(targets)
                assert seen == samples

            return read

        bare = DataLoader(dataset, batch, shuffle=True, **kept)
        ways = {BARE: epoch(bare, lambda tensor: tensor.to(strategy.device, non_blocking=True))}
        for name, seeded in ((OURS, True), (UNSEEDED, False)):
            ways[name] = epoch(
                strategy.dataloader(dataset, batch_size=batch, shuffle=True, sample_seeding=seeded, **kept)
            )
        clock = time.perf_counter if workers else time.process_time
        return compared(alternate(ways, rounds, clock=clock), BARE, samples)


def measure(short: bool) -> Found:
    cases = []
    rounds = SHORT_ROUNDS if short else ROUNDS
    for data, (samples, batch) in (SHORT_SIZES if short else SIZES).items():
        for workers in WORKERS:
            how: dict[str, Any] = {"data": data, "samples": samples, "batch": batch, "workers": workers}
            cases.append({**how, "ways": in_processes(ALONE, measure_loaders, rounds=rounds, **how)})
    return {"cases": cases}


def tables(found: Found) -> str:
    rows = [
        [
            case["data"], case["workers"], name, f"{1 / one['seconds']:,.0f}", f"{one['over_s'] * 1e6:+.2f}",
            shown_ratio(one),
        ]
        for case in found["cases"] for name, one in case["ways"].items()
    ]  # fmt: skip
    head = ["data", "workers", "loader", "samples/s", "over bare, µs a sample", "time / bare's (quartiles)"]
    return table(head, rows)


def plot(found: Found, figure: Figure) -> None:
    axis = figure.subplots()
    for i, name in enumerate((BARE, OURS, UNSEEDED)):
        heights = [1 / case["ways"][name]["seconds"] for case in found["cases"]]
        axis.bar([place + 0.27 * (i - 1) for place in range(len(heights))], heights, 0.25, label=name)
    axis.set_xticks(range(len(heights)), [f"{case['data']}, {case['workers']} workers" for case in found["cases"]])
    axis.set_yscale("log")
    axis.set_ylabel("samples/s")
    axis.legend()


if __name__ == "__main__":
    run(measure, tables, plot)
