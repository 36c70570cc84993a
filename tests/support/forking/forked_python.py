"""A ``python`` that starts in 0.1 s of processor time instead of 3.4: it is forked from a process that has torch.

In a test with the fixture ``forked``, launchers start such ranks, and are such programs themselves. A fork gets
the environment, streams and signals of the process that stands for it (``asking.py``), but is not its child: tests of
who ends whom need real processes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from jobs import LEAVE_S, end_marked
from places import TESTS

from unitrain.launch.local import toolchain

_SCRIPTS = ("torchrun", "horovodrun", "unitrain")
_HERE = TESTS / "support" / "forking"
_PYTHON = sys.executable
_running: tuple[Path, subprocess.Popen[bytes]] | None = None


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``sys.executable`` and the programs that are found in PATH forked. The first call starts what forks them."""
    global _running
    if _running is None:
        _running = _start()
    programs = _running[0]
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHON_EXEC", str(programs / "python"))  # torchrun's setting
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr(toolchain, "search_path", lambda: os.environ["PATH"])


def command(*script: str) -> list[str]:
    """Return the command that runs one script, given with its arguments, in a fork."""
    global _running
    if _running is None:
        _running = _start()
    return [_PYTHON, "-I", "-S", str(_HERE / "asking.py"), str(_running[0]), *script]


def is_forked(words: object) -> bool:
    """Whether a command runs a script in a fork."""
    return _running is not None and str(_running[0]) in str(words)


def running() -> list[psutil.Process]:
    """Return the forks that run."""
    return [fork for pid in pids() for fork in psutil.Process(pid).children()]


def end_left() -> tuple[str, ...]:
    """Kill what forks have left running, and return descriptions."""
    return () if _running is None else end_marked(str(_running[0]), LEAVE_S, but=pids())


def pids() -> set[int]:
    """Return the process that forks, if it runs."""
    return set() if _running is None else {_running[1].pid}


def close() -> None:
    """End the process that forks."""
    global _running
    if _running is not None:
        _running[1].communicate()
        shutil.rmtree(_running[0])
        _running = None


def _start() -> tuple[Path, subprocess.Popen[bytes]]:
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    for name in ("python", "python3", *_SCRIPTS):
        program, script = folder / name, Path(sys.executable).parent / name if name in _SCRIPTS else ""
        forked = f'exec {sys.executable} -I -S {_HERE / "asking.py"} {folder} {script} "$@"'
        # unitrain run ends with what started it.
        real = f'[ "$1" = run ] && exec {script} "$@"\n' if name == "unitrain" else ""
        program.write_text(f"#!/bin/sh\n{real}{forked}\n")
        program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{folder}")
        server.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", f"import serving; serving.main({server.fileno()})"],
            env={**os.environ, "PYTHONPATH": str(_HERE), "TESTS_JOB": str(folder)},
            pass_fds=[server.fileno()],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    return folder, process
