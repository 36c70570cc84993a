"""The cost of starting an epoch and of seeking in it, compared with torch's DistributedSampler.

    python benchmarks/sampler.py

One rank of 8 asks for batches of 256 indices of a shuffled epoch. Each figure is measured in a process of its own: the
time is the thread's CPU time, so that other work on the machine counts little, and the memory is the increase of the
process's peak. DistributedSampler can't seek, so it is timed while it iterates over the consumed indices.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from shared.processes import ALONE, in_processes
from shared.report import Found, run, table
from unitrain.data.order.order import Shuffled
from unitrain.data.order.samplers import OwnOrder
from unitrain.data.order.sharding import EpochPlan
from unitrain.data.reading.map_style import requests

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES, ROUNDS = (10**6, 10**7, 10**8, 10**9), 2
SHORT_SIZES, SHORT_ROUNDS = (10**5,), 1
RANK, WORLD, BATCH = 3, 8, 256
SOUGHT = 0.75
# At its peak, DistributedSampler's list takes 46 bytes per index: 46 GB for 10^9.
LARGEST_FOR_TORCH = 10**8
KINDS = ("unitrain", "torch")
FIGURES = {
    "start": {"seconds": "{:.4f} s", "peak_mb": "{:.1f} MB", "indices_per_second": "{:.3g} /s"},
    "seek": {"seconds": "{:.4f} s", "peak_mb": "{:.1f} MB"},
}


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
    plan = EpochPlan(samples, BATCH * WORLD, 1, RANK, WORLD, False)
    start = int(SOUGHT * samples / plan.global_batch) * plan.global_batch if sought else 0
    return (request.samples for request in requests(OwnOrder(plan, shuffle=True).epoch(0, 0, start), None, 0))


def measure_one(kind: str, samples: int, what: str) -> dict[str, float]:
    """Measure one figure, in this process."""
    torch.set_num_threads(1)
    next(batches(kind, 1000, False))  # imports and first calls
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    begun = batches(kind, samples, what == "seek")
    next(begun)
    seconds = time.thread_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    figures = {"seconds": seconds, "peak_mb": peak / 1024}
    if what == "start":
        start = time.thread_time()
        read = sum(map(len, islice(begun, 2 * 10**6 // BATCH)))
        figures["indices_per_second"] = read / (time.thread_time() - start)
    return figures


def order_pace(samples: int) -> float:
    """Return the indices per second of the order alone, in arrays."""
    shuffled, positions = Shuffled(samples, 0, 0), np.arange(min(samples, 10**6))
    times = []
    for _ in range(5):
        start = time.thread_time()
        shuffled.take(positions)
        times.append(time.thread_time() - start)
    return len(positions) / min(times)


def measure(short: bool) -> Found:
    sizes, rounds = (SHORT_SIZES, SHORT_ROUNDS) if short else (SIZES, ROUNDS)
    rows = []
    for samples in sizes:
        for what in FIGURES:
            kinds = KINDS if samples <= LARGEST_FOR_TORCH else KINDS[:1]
            runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for _ in range(rounds):
                for kind in kinds:
                    runs[kind].append(in_processes(ALONE, measure_one, kind=kind, samples=samples, what=what))
            for kind, found in runs.items():
                medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
                rows.append({"kind": kind, "samples": samples, "what": what, **medians})
    return {
        "rows": rows,
        "order_per_second": {str(samples): order_pace(samples) for samples in sizes},
        "rounds": rounds,
    }


def tables(found: Found) -> str:
    by_key = {(row["samples"], row["what"], row["kind"]): row for row in found["rows"]}
    rows = []
    for samples in dict.fromkeys(row["samples"] for row in found["rows"]):
        for what, figures in FIGURES.items():
            ours, theirs = by_key[samples, what, "unitrain"], by_key.get((samples, what, "torch"))
            for name, shown in figures.items():
                other = "not run: 46 bytes a sample" if theirs is None else shown.format(theirs[name])
                ratio = "" if theirs is None or not ours[name] else f"{theirs[name] / ours[name]:.3g}"
                rows.append([f"{samples:.0e}", f"{what}, {name}", shown.format(ours[name]), other, ratio])
    paces = ", ".join(f"{float(samples):.0e}: {pace:.3g}" for samples, pace in found["order_per_second"].items())
    return "\n".join(
        [
            f"One rank ({RANK} of {WORLD}), batches of {BATCH}, shuffled; CPU time, median of {found['rounds']}.",
            "",
            table(["samples", "", "unitrain", "torch DistributedSampler", "torch / unitrain"], rows),
            f"The order alone, in arrays, indices a second by samples: {paces}.",
        ]
    )


def plot(found: Found, figure: Figure) -> None:
    figure.set_size_inches(10, 4)
    axes = figure.subplots(1, 2)
    for axis, name, label in zip(
        axes, ("seconds", "peak_mb"), ("seconds to the first batch", "peak memory, MB"), strict=True
    ):
        for kind, what in ((kind, what) for kind in KINDS for what in ("start", "seek")):
            rows = [row for row in found["rows"] if (row["kind"], row["what"]) == (kind, what)]
            style = {"marker": "o", "linestyle": "-" if what == "start" else "--", "color": f"C{KINDS.index(kind)}"}
            values = [max(row[name], 1e-4) for row in rows]
            axis.loglog([row["samples"] for row in rows], values, label=f"{kind}, {what}", **style)
        axis.set_xlabel("samples")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("Starting a shuffled epoch, and seeking to three quarters of it, on one rank of 8")


if __name__ == "__main__":
    run(measure, tables, plot)
