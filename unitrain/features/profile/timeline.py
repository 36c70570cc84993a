"""Puts the events of several ranks on one timeline: a trace in the format that Chrome and Perfetto read.

The clocks of hosts are compared by barriers. Nobody leaves one before all have entered it, so the times at which a rank
enters and leaves bound the offset of its clock, as a request and its answer do in Cristian's algorithm (F. Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989). The narrowest bounds are used.
"""

from __future__ import annotations

import gzip
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from time import monotonic_ns
from typing import Any

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator

_BARRIERS = 20


def clock() -> float:
    """Return the time of this host's clock, in microseconds."""
    return monotonic_ns() / 1e3


def compare_clocks(communicator: Communicator) -> tuple[Tensor, float, float]:
    """Compare the clocks of all ranks. Collective. Times are in microseconds.

    Returns:
        How far the clock of each rank is ahead of rank 0's, how wrong any of these offsets is at most, and rank 0's
        time.
    """
    times = torch.empty(_BARRIERS, 2, dtype=torch.float64)
    for time in times:
        time[0] = clock()
        communicator.barrier()
        time[1] = clock()
    entered, left = communicator.all_gather(times).unbind(2)
    low, high = (entered - left[0]).amax(1), (left - entered[0]).amin(1)
    same = (low <= 0) & (high >= 0)  # it counts from the start of the host, so this is the clock of rank 0's host
    offsets, errors = (torch.where(same, 0.0, twice / 2) for twice in (low + high, high - low))
    return offsets, errors.max().item(), left[0, -1].item()


def part_of(rank: int, events: Iterable[dict[str, Any]], shift: float) -> bytes:
    """Return a rank's part of a trace, compressed: one process, with threads of the CPU and streams of GPUs.

    ``events`` are changed: their times are moved by ``shift`` (microseconds).
    """
    label = {"name": f"rank {rank} on {platform.node()}"}
    rows: list[dict[str, Any]] = [{"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": label}]
    threads: dict[tuple[int, Any], int] = {}
    for event in events:
        process, name = event["pid"], event["name"]
        if not isinstance(process, int) or name.startswith("process_"):
            continue  # of the profiler itself
        if name.startswith("enumerate(DataLoader)"):  # torch's own mark
            event["name"] = "unitrain: data"
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"  # an arrow would else lead to another rank
        event["tid"] = threads.setdefault((process, event["tid"]), len(threads))
        event["pid"], event["ts"] = rank, round(event["ts"] + shift, 3)
        rows.append(event)
    return gzip.compress(b",\n".join(json.dumps(row).encode() for row in rows), compresslevel=3)


def write_trace(file: Path, parts: Iterable[bytes]) -> None:
    """Write a trace of several ranks' parts, with one in memory at a time."""
    with gzip.open(file, "wb", compresslevel=3) as trace:  # one stream: not every viewer reads several
        for number, part in enumerate(parts):
            trace.write((b",\n" if number else b'{"traceEvents": [\n') + gzip.decompress(part))
        trace.write(b"\n]}\n")
