"""Samples per second to the device beside a bare DataLoader; and starting an epoch, and seeking in it.

    python benchmarks/loading.py

Whole epochs, shuffled, in turns in one process, without workers and with two persistent ones. By default, UniTrain
seeds each sample, which no DataLoader does, so it is measured without that, too.

- ``rows``: a ``TensorDataset``.
- ``rows, own class``: the same rows from a user's class, which might draw random numbers. Its samples cost next to
  nothing, so that the loader's own cost shows.
- ``crops``: images as tensors, cropped and flipped by three random numbers of torch's, and normalised.
- ``images``: JPEGs, decoded, then cropped, resized, flipped and normalised by torchvision.

Without workers, the process's CPU time is measured; with workers, wall-clock time.

For starts and seeks, one rank of 8 asks for batches of 256 indices of a shuffled epoch, in a process for each figure:
the thread's CPU time, and the increase of the process's peak memory. torch's DistributedSampler can't seek, so it is
timed while it iterates over the consumed indices.
"""

from __future__ import annotations

import io
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

import unitrain
from shared.processes import ALONE, in_processes
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, shown_ratio
from unitrain.data.order.samplers import Orders
from unitrain.data.order.sharding import EpochPlan
from unitrain.data.reading.map_style import requests

BARE, OURS, UNSEEDED = "bare DataLoader", "UniTrain", "UniTrain, sample_seeding=False"
WORKERS = (0, 2)
# Samples per epoch, and per batch.
SIZES = {"rows": (50_000, 256), "rows, own class": (50_000, 256), "crops": (2_000, 64), "images": (1_000, 64)}
SHORT_SIZES = {"rows": (512, 256), "rows, own class": (512, 256), "crops": (128, 64), "images": (128, 64)}
ROUNDS, SHORT_ROUNDS = 15, 2

EPOCHS, EPOCH_ROUNDS = (10**6, 10**8, 10**9), 2
SHORT_EPOCHS, SHORT_EPOCH_ROUNDS = (10**5,), 1
RANK, WORLD, BATCH = 3, 8, 256
SOUGHT = 0.75
# At its peak, DistributedSampler's list takes 46 bytes per index: 46 GB for 10^9.
LARGEST_FOR_TORCH = 10**8
STARTS = ("start", "seek")


def rows(length: int) -> TensorDataset:
    """Return a dataset of rows of 64 floats and a class."""
    return TensorDataset(torch.randn(length, 64), torch.arange(length) % 10)


class Rows(Dataset[tuple[Tensor, int]]):
    """The data of ``rows``, in a class of its own."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randn(length, 64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], index % 10


class Crops(Dataset[tuple[Tensor, int]]):
    """Images of 3 x 64 x 64, randomly cropped to 56 x 56, randomly flipped, and normalised."""

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


class Images(Dataset[tuple[Tensor, int]]):
    """JPEGs of 3 x 96 x 96 in memory, augmented as for training on ImageNet to 3 x 64 x 64."""

    def __init__(self, length: int) -> None:
        # 8 x 8 blurred squares of colour: noise would take longer to decode than a photograph.
        squares = torch.nn.functional.interpolate(torch.rand(length, 3, 8, 8), size=96, mode="bicubic").clamp_(0, 1)
        self.files = [_as_jpeg(image) for image in squares]
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(64),
                v2.RandomHorizontalFlip(),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5, 0.5, 0.5], [0.25, 0.25, 0.25]),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.open(io.BytesIO(self.files[index])).convert("RGB")), index % 10


def _as_jpeg(image: Tensor) -> bytes:
    file = io.BytesIO()
    to_pil_image(image).save(file, "JPEG", quality=90)
    return file.getvalue()


DATA: dict[str, Callable[[int], Any]] = {"rows": rows, "rows, own class": Rows, "crops": Crops, "images": Images}


def measure_loaders(data: str, samples: int, batch: int, workers: int, rounds: int) -> Found:
    """Measure each loader over whole epochs."""
    dataset = DATA[data](samples)
    kept: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    with unitrain.init(device="cpu") as strategy:
        torch.set_num_threads(1)

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


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def batches(kind: str, samples: int, sought: bool) -> Iterator[list[int]]:
    """Yield one rank's batches of indices, from the beginning or from ``SOUGHT`` of the epoch on."""
    if kind == "torch":
        sampler: Any = DistributedSampler(Numbers(samples), WORLD, RANK, seed=0)  # type: ignore[arg-type]
        whole = iter(BatchSampler(sampler, BATCH, drop_last=False))
        return islice(whole, int(SOUGHT * samples / WORLD / BATCH) if sought else 0, None)
    plan = EpochPlan(
        samples=samples, global_batch=BATCH * WORLD, accumulate=1, rank=RANK, world_size=WORLD, drop_last=False
    )
    start = int(SOUGHT * samples / plan.global_batch) * plan.global_batch if sought else 0
    epoch = Orders(plan, lambda: samples, shuffle=True).epoch(0, 0, start)
    return (request.samples for request in requests(epoch, epoch.plan, None, 0))


def measure_start(kind: str, samples: int, what: str) -> dict[str, float]:
    """Measure one figure, in this process."""
    torch.set_num_threads(1)
    next(batches(kind, 1000, False))  # imports and first calls
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    next(batches(kind, samples, what == "seek"))
    seconds = time.thread_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "peak_mb": peak / 1024}


def measure(short: bool) -> Found:
    cases = []
    rounds = SHORT_ROUNDS if short else ROUNDS
    for data, (samples, batch) in (SHORT_SIZES if short else SIZES).items():
        for workers in WORKERS:
            how: dict[str, Any] = {"data": data, "samples": samples, "batch": batch, "workers": workers}
            cases.append({**how, "ways": in_processes(ALONE, measure_loaders, rounds=rounds, **how)})
    return {"cases": cases, "epochs": measure_epochs(short)}


def measure_epochs(short: bool) -> list[Found]:
    sizes, rounds = (SHORT_EPOCHS, SHORT_EPOCH_ROUNDS) if short else (EPOCHS, EPOCH_ROUNDS)
    rows: list[Found] = []
    for samples in sizes:
        for what in STARTS:
            for kind in ("unitrain", "torch")[: 2 if samples <= LARGEST_FOR_TORCH else 1]:
                found = [
                    in_processes(ALONE, measure_start, kind=kind, samples=samples, what=what) for _ in range(rounds)
                ]
                medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
                rows.append({"kind": kind, "samples": samples, "what": what, **medians})
    return rows


def tables(found: Found) -> str:
    loading = [
        [
            case["data"],
            case["workers"],
            f"{1 / case['ways'][BARE]['seconds']:,.0f}",
            *(f"{one['over_s'] * 1e6:+.2f} µs: {shown_ratio(one)}" for one in list(case["ways"].values())[1:]),
        ]
        for case in found["cases"]
    ]
    by_key = {(row["samples"], row["what"], row["kind"]): row for row in found["epochs"]}
    starts = [
        [f"{samples:.0e}", what, _start(row), _start(by_key.get((samples, what, "torch")))]
        for (samples, what, kind), row in by_key.items()
        if kind == "unitrain"
    ]
    return "\n".join(
        [
            table(["data", "workers", f"{BARE}, samples/s", OURS, UNSEEDED], loading),
            "More time a sample than the bare DataLoader, and the ratio to it.\n",
            table(["samples", "", "UniTrain", "DistributedSampler"], starts),
        ]
    )


def _start(row: Found | None) -> str:
    return "not run: 46 bytes a sample" if row is None else f"{row['seconds']:.3f} s, {row['peak_mb']:,.0f} MB"


if __name__ == "__main__":
    run(measure, tables)
