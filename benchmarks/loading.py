"""Samples per second to the device: a strategy's loader compared with a bare DataLoader with the same settings.

    python benchmarks/loading.py

Whole epochs, shuffled, in turns in one process, without workers and with two persistent ones. By default, UniTrain
seeds each sample, which no DataLoader does, so it is measured without that, too.

- ``rows``: a ``TensorDataset``.
- ``rows, own class``: the same rows from a user's class, which might draw random numbers. Its samples cost next to
  nothing, so that the loader's own cost shows.
- ``crops``: images as tensors, cropped and flipped by three random numbers of torch's, and normalised.
- ``images``: JPEGs, decoded, then cropped, resized, flipped and normalised by torchvision.

Without workers, the process's CPU time is measured; with workers, wall-clock time. ``sampler.py`` measures how fast an
epoch starts and seeks.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

import unitrain
from shared.processes import ALONE, in_processes
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, shown_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BARE, OURS, UNSEEDED = "bare DataLoader", "UniTrain", "UniTrain, sample_seeding=False"
WORKERS = (0, 2)
# Samples per epoch, and per batch.
SIZES = {"rows": (50_000, 256), "rows, own class": (50_000, 256), "crops": (2_000, 64), "images": (1_000, 64)}
SHORT_SIZES = {"rows": (512, 256), "rows, own class": (512, 256), "crops": (128, 64), "images": (128, 64)}
ROUNDS, SHORT_ROUNDS = 15, 2


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
    figure.set_size_inches(12, 5)
    axis = figure.subplots()
    for i, name in enumerate((BARE, OURS, UNSEEDED)):
        heights = [1 / case["ways"][name]["seconds"] for case in found["cases"]]
        axis.bar([place + 0.27 * (i - 1) for place in range(len(heights))], heights, 0.25, label=name)
    axis.set_xticks(range(len(heights)), [f"{case['data']}\n{case['workers']} workers" for case in found["cases"]])
    axis.set_yscale("log")
    axis.set_ylabel("samples/s")
    axis.legend()


if __name__ == "__main__":
    run(measure, tables, plot)
