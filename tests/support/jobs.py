"""``run_job``: runs a command with a time limit, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from places import ROOT

RECIPE = ROOT / "recipes" / "resnet.py"
LEAVE_S = 5.0


@dataclass(frozen=True)
class Job:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    ended: float
    """When the command ended, in seconds since the epoch."""
    left: tuple[str, ...]
    """Its processes that still ran some seconds later, and were killed."""

    @property
    def output(self) -> str:
        """Stdout and stderr, for messages."""
        return f"{self.stdout}\n---- stderr ----\n{self.stderr}"


def run_job(
    command: Sequence[str],
    folder: Path,
    *,
    environ: Mapping[str, str] | None = None,
    deadline: float = 120,
    meanwhile: Callable[[subprocess.Popen[bytes]], object] = lambda process: None,
) -> Job:
    """Run a command in ``folder``, this environment's programs first, and return how it ended.

    Args:
        command: a program and its arguments.
        folder: where it runs.
        environ: variables that are added to this environment.
        deadline: seconds that it may take.
        meanwhile: is called with the process once it has been started.

    Raises:
        TimeoutError: it had not ended after ``deadline`` seconds; it has been killed then, with all that it started.
    """
    # All processes that a launcher starts inherit this variable, and can be found by it, in any session.
    mark = f"job-{uuid.uuid4()}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UNITRAIN_")}
    given = {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **(environ or {}),
        "TESTS_JOB": mark,
    }
    out, err = folder / f"{mark}.stdout", folder / f"{mark}.stderr"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            meanwhile(process)
            code = process.wait(deadline)
        except BaseException as error:
            end_marked(mark, 0.0)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise TimeoutError(f"{' '.join(command)}\n{out.read_text()}\n{err.read_text()}") from None
        ended = time.time()
    return Job(code, out.read_text(), err.read_text(), ended, end_marked(mark, LEAVE_S))


def end_marked(mark: str, patience: float, but: Collection[int] = ()) -> tuple[str, ...]:
    """Kill the processes with a mark that don't end by themselves, and return their descriptions."""
    marked = [process for process in psutil.process_iter() if process.pid not in but and _has(process, mark)]
    _, left = psutil.wait_procs(marked, patience)
    said = []
    for process in left:
        try:
            said.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return tuple(said)


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("TESTS_JOB") == mark
    except psutil.Error:  # another user's, or gone
        return False
