"""Print what the fault tests have noted, as a table: what happened, how long it took to end, and what was said.

TESTS_ENDS=ends.jsonl pytest tests/faults
python tests/faults/report.py ends.jsonl
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from textwrap import fill

HEAD = """# Faults

What the fault tests saw: real jobs of two or three processes, each of which met with one fault. `kill:1:7` is a
SIGKILL of rank 1 after step 7, `kill:0:close` one of rank 0 where the others wait for it, `stop` a SIGSTOP,
`hold-gil` a call that never lets another thread run, `exit` an end with status 0 while the others train, `term`
and `int` a signal to one rank. Heartbeats had 3 seconds and collectives 8, where the defaults are 30 and 600.
Nothing was lost but the steps since the last checkpoint, after a signal none, and no process was left. `make soak`
writes this page; `make test` runs the quick ones.
"""
KILLS = (
    "Ranks were also killed at moments drawn at random, within starts, steps and saves, and the job was started again "
    "until it came to its end: {}. It was then the training to which nothing had happened, each sample once and the "
    "losses equal to 1e-9."
)


def main(file: Path) -> None:
    ends = [json.loads(line) for line in file.read_text().splitlines()]
    kills = [f"{end['kills']} times under {end['world']}" for end in ends if "kills" in end]
    print(f"{HEAD}\n{fill(KILLS.format(', '.join(kills)), 120, break_on_hyphens=False)}\n")
    print(f"Seen on {os.cpu_count()} cores ({platform.machine()}), torch {version('torch')}.\n")
    print("| fault:rank:step or place | launcher-backend | seconds to the end | exit code | what was said first |")
    print("|---|---|---|---|---|")
    latest = {(end["fault"], end["world"]): end for end in ends if "fault" in end}
    for (fault, world), end in sorted(latest.items()):
        print(f"| {fault} | {world} | {end['seconds']:.1f} | {end['code']} | {end['said']} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
