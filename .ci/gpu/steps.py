"""Runs the steps of a script, each within a time limit of its own, and writes what each has shown as it ends.

It needs nothing but Python. A step that hangs costs its limit, and a script that is killed leaves what it has found.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from machine import ROOT, Machine, set_up

_BUDGET_S = 400.0
_SHORTEST_S = 5.0
_GRACE_S = 5.0
_WIDTH = 160


@dataclass(frozen=True)
class Step:
    """A command with a time limit."""

    name: str
    seconds: float
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    """The name of a step that must have succeeded."""
    shown: int = 12
    """Number of lines at the end of its output that are shown; the log has all."""


class Script:
    """One of the scripts: its machine, the time that it has left, and its report in the folder OUT.

    Attributes:
        machine: where it runs.
        failed: the names of the steps that failed.
    """

    def __init__(self, description: str | None = None) -> None:
        parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
        parser.add_argument("--dry-run", action="store_true", help="run the steps here, on the simulated device")
        dry_run = parser.parse_args().dry_run
        self._ends = time.monotonic() + _BUDGET_S
        self._output = Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
        self._output.mkdir(parents=True, exist_ok=True)
        self._name = Path(sys.argv[0]).stem
        self._succeeded: set[str] = set()
        self._writing = threading.Lock()
        self.failed: list[str] = []
        self.output: str = str(self._output)
        self.machine: Machine = set_up(dry_run)

    def run(self, *steps: Step) -> None:
        """Run steps at the same time, and return when all have ended."""
        with ThreadPoolExecutor(len(steps)) as pool:
            list(pool.map(self._run, steps))

    def end(self) -> None:
        """Exit, with code 1 if a step failed."""
        print(f"failed: {', '.join(self.failed) or 'nothing'}", flush=True)
        sys.exit(bool(self.failed))

    def _run(self, step: Step) -> None:
        if step.needs and step.needs not in self._succeeded:
            self._report(step, f"left out, since it needs: {step.needs}", "")
            return
        left = self._ends - time.monotonic()
        if left < _SHORTEST_S:
            self._report(step, "left out: no time is left", "")
            return
        # A dry run is beside other tests, on as few cores as there are.
        limit = min(step.seconds * (3 if self.machine.dry_run else 1), left)
        start, mark = time.monotonic(), f"GPU_STEP={uuid.uuid4()}"
        name, _, value = mark.partition("=")
        environment = {**self.machine.environment, **step.environment, name: value}
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                ended = f"exit code {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                ended = f"not ended after {limit:.0f} s"
                process.send_signal(signal.SIGINT)  # pytest then says what it has seen
                time.sleep(_GRACE_S)
            _kill(mark)
            process.wait()
            output.seek(0)
            text = output.read()
        if ended == "exit code 0":
            self._succeeded.add(step.name)
        else:
            self.failed.append(step.name)
        self._report(step, f"{ended}, {time.monotonic() - start:.0f} s", text)

    def _report(self, step: Step, ended: str, text: str) -> None:
        lines = [line[:_WIDTH] for line in text.splitlines() if line.strip()]
        shown = "\n".join([f"## {step.name}: {ended}", *lines[-step.shown :], ""])
        with self._writing:
            print(shown, flush=True)
            for suffix, written in ((".md", shown), (".log", f"{shown.splitlines()[0]}\n{text}\n")):
                with (self._output / f"{self._name}{suffix}").open("a") as file:
                    file.write(f"{written}\n")


def _kill(mark: str) -> None:
    """Kill the processes that a step has left: they would hold the GPU's memory, and disturb later steps."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or is another user's
