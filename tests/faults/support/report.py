"""Print the fault tests' results, which docs/about/faults.md shows: the time until the job ended, and a message.

TESTS_ENDS=ends.jsonl pytest tests/faults
python tests/faults/support/report.py ends.jsonl
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any

WALKS = (
    "Random walks changed launcher, backend (ddp, horovod, fsdp, ZeRO-1) and the number of ranks (1 to 4) at each "
    "start, and were ended by SIGKILL, SIGTERM, a frozen rank, a killed launcher or a full disk: {} starts in {} "
    "walks. Each sample was used once, and the final weights equalled an undisturbed process's, to 1e-9."
)


def table(ends: list[dict[str, Any]]) -> str:
    """Return a row for each fault, with the seconds and the exit code under each launcher, and a message."""
    latest = {(end["fault"], end["world"]): end for end in ends if "fault" in end}
    every = [world for _, world in latest]
    worlds = sorted({world for world in every if every.count(world) > 1})  # not one-offs
    first: dict[str, str] = {}  # the fault with which each message came first
    rows = [["fault:rank:step or place", *worlds, "message"], ["---"] * (len(worlds) + 2)]
    for fault in sorted({fault for fault, world in latest if world in worlds}):
        its = [latest.get((fault, world)) for world in worlds]
        cells = [f"{end['seconds']:.1f} s, {end['code']}" if end else "" for end in its]
        said = min((end["said"] for end in its if end and end["said"]), key=len, default="")
        kind = re.sub(r"\d+", "N", said)
        rows.append([fault, *cells, f"as {first[kind]}" if kind and kind in first else said])
        first.setdefault(kind, fault)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(file: Path) -> None:
    ends = [json.loads(line) for line in file.read_text().splitlines()]
    walks = {end["walk"]: end["starts"] for end in ends if "walk" in end}
    print(f"{fill(WALKS.format(sum(walks.values()), len(walks)), 120, break_on_hyphens=False)}\n")
    print(f"Run on {os.cpu_count()} cores ({platform.machine()}), torch {version('torch')}.\n")
    print(
        "Seconds until the job ended, more if the machine had other work, and its exit code; the message is the "
        "shortest under any launcher.\n"
    )
    print(table(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
