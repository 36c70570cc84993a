"""One trace of several ranks, in the Trace Event Format that Chrome and Perfetto read, from what torch exports."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def part_of(rank: int, host: str, events: Iterable[Event], aligned: Callable[[float], float]) -> bytes:
    """Return a rank's part of a trace, compressed: one process, whose threads are those of the CPU and GPU streams.

    ``events`` are changed. ``aligned`` returns a time on the clock that all ranks share, in microseconds.
    """
    threads: dict[tuple[int, Any], int] = {}
    naming = {"ph": "M", "pid": rank, "tid": 0}
    rows: list[Event] = [
        {**naming, "name": "process_name", "args": {"name": f"rank {rank} on {host}"}},
        {**naming, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for event in events:
        process, name = event["pid"], event["name"]
        if not isinstance(process, int) or name.startswith("process_"):
            continue  # of the profiler itself
        if name.startswith("enumerate(DataLoader)"):  # torch's own mark
            event["name"] = "unitrain: data"
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"  # an arrow would else lead to another rank
        event["tid"] = threads.setdefault((process, event["tid"]), len(threads))
        event["pid"], event["ts"] = rank, round(aligned(event["ts"]), 3)
        rows.append(event)
    return gzip.compress(b",\n".join(json.dumps(row).encode() for row in rows), compresslevel=3)


def write_trace(file: Path, parts: Iterable[bytes]) -> None:
    """Write a trace of several ranks' parts, one of which is in memory at a time."""
    with gzip.open(file, "wb", compresslevel=3) as trace:  # one stream: not every viewer reads several
        for number, part in enumerate(parts):
            trace.write(b",\n" if number else b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            trace.write(gzip.decompress(part))
        trace.write(b"\n]}\n")
