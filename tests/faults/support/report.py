"""Print the fault tests' records as a table: the fault, the time until the job ended, and the first message.

TESTS_ENDS=ends.jsonl pytest tests/faults
python tests/faults/support/report.py ends.jsonl
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any

HEAD = """# Faults

How real jobs of two or three processes ended when the tests caused a fault in one of them. `make soak` writes this
page; `make test` runs the quick ones. The heartbeat timeout was 3 seconds and the timeout of collectives 8; the
defaults are 30 and 600. A fault lost at most the step that it came in, a signal lost none, and no process was left
over. The launcher `plain` stands for processes started with `RANK`, `WORLD_SIZE`, … set by hand.

| what dies | what is lost |
|---|---|
| a rank, in a step or between two epochs | at most this step: another [saves][emergency] the one before |
| a rank, while the others wait for it between a step and the next batch | the steps since the last checkpoint |
| a rank, with checkpoints at a URL | the steps since the last checkpoint |
| all ranks, their only host, or the one rank of a job | the steps since the last checkpoint |
| a rank of a sharded model, or on a GPU | the steps since the last checkpoint |

[emergency]: reliability.md#emergency-checkpoints

| fault | what happens |
|---|---|
| `kill:1:7` | rank 1 gets a SIGKILL after step 7 |
| `kill:0:init`, … | rank 0 gets a SIGKILL there (`init`, `prepare`, evaluation, `close`); the others wait for it |
| `raise`, `segfault`, `os-exit` | the rank raises an error, crashes, or calls `os._exit` |
| `exit` | the rank exits with status 0 while the others train, before they have joined (`init`), or started (`start`) |
| `thread`, `exit-handler` | the rank has a thread that is not a daemon, or an exit handler, that never ends |
| `clock` | the clock is set forward by an hour |
| `stop` | the rank gets a SIGSTOP |
| `hold-gil` | the rank makes a call that never releases the GIL |
| `spin` | the rank loops forever in its own code |
| `extra-collective` | the rank calls a collective that the others don't |
| `term`, `int`, `usr1` | one rank gets SIGTERM, SIGINT or SIGUSR1 |
"""
KILLS = (
    "Ranks were also killed at random moments during start-up, steps and saves, and the job was restarted until it was "
    "done: {}. The result was that of a run without faults: each sample was used once, and the losses were equal to "
    "1e-9."
)

SURVIVED = (
    "In jobs without any checkpoint but those of survivors, {} ranks were killed, one in each start of a job but the "
    "last. Every job went on by itself to its end, and of the steps that a start had begun, the next one made at most "
    "one again. Each sample was used once an epoch, and the weights were equal to 1e-9 to those of one process."
)


def survived(ends: list[dict[str, Any]]) -> str:
    """Return the table of kills that the survivors have outlived."""
    latest = {(end["world"], *end["plan"]): end for end in ends if "killed" in end}
    text = fill(SURVIVED.format(sum(end["killed"] for end in latest.values())), 120, break_on_hyphens=False)
    rows = [
        f"| {end['world']} | {', '.join(map(str, end['plan']))} | {'; '.join(end['phases'])} | {max(end['again'])} |"
        for _, end in sorted(latest.items())
    ]
    head = ["| launcher-backend | ranks of each start | killed in | steps made again, at most |", "|---|---|---|---|"]
    return "\n".join([text, "", *head, *rows])


def main(file: Path) -> None:
    ends = [json.loads(line) for line in file.read_text().splitlines()]
    kills = [f"{end['kills']} times under {end['world']}" for end in ends if "kills" in end]
    print(f"{HEAD}\n{fill(KILLS.format(', '.join(kills)), 120, break_on_hyphens=False)}\n")
    print(f"{survived(ends)}\n")
    print(f"Run on {os.cpu_count()} cores ({platform.machine()}), torch {version('torch')}.\n")
    print("| fault:rank:step or place | launcher-backend | seconds to the end | exit code | first message |")
    print("|---|---|---|---|---|")
    latest = {(end["fault"], end["world"]): end for end in ends if "fault" in end}
    for (fault, world), end in sorted(latest.items()):
        print(f"| {fault} | {world} | {end['seconds']:.1f} | {end['code']} | {end['said']} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
