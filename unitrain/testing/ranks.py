"""``run_ranks``: a function run as n ranks, in new processes, at the price of a unit test.

The processes are forked from a server that has torch imported (0.1 s for a start instead of spawn's 3 s), meet without
a fixed port, and never outlive the call. The function is one of a module's top level, for it is pickled; it calls
``unitrain.init`` like a script.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from unitrain.commands.launchers import launch_command
from unitrain.commands.toolchain import running, small_mpi_environment
from unitrain.job.spawn import run_processes, spawn_environments
from unitrain.launch.detect import detect

Environments: TypeAlias = Callable[[int], AbstractContextManager[list[dict[str, str]]]]
"""Gives the complete environment of each of so many ranks, while it is entered."""
Launcher: TypeAlias = str | Environments
"""Who starts the ranks: one of ``LAUNCHERS``, or a function for environments of its own making."""
LAUNCHERS = ("python", "spawn", "torchrun", "mpirun", "horovodrun", "srun")
"""The first two, and functions, start ranks in a fraction of a second, and the others in seconds."""

_FORKSERVER = multiprocessing.get_context("forkserver")
# pytest, because every child imports the parent's main module, and this is what that module imports; torch's compiler,
# because the first step of any optimizer imports it (2 s).
_PRELOADED = [
    "pytest", "torch._dynamo", "torch._inductor", "unitrain.initialize", "unitrain.data", "unitrain.testing.duties",
]  # fmt: skip


def preload(modules: Sequence[str]) -> None:
    """Have the server import these modules, which else each rank would. Without effect once a rank was started."""
    _FORKSERVER.set_forkserver_preload([*_PRELOADED, *modules])


preload([])


def run_ranks(
    fn: Callable[..., Any], *args: Any, nprocs: int = 2, timeout: float = 60, launcher: Launcher = "spawn"
) -> list[Any]:
    """Run ``fn(*args)`` as each of ``nprocs`` ranks and return what each returned.

    Args:
        fn: a function of a module's top level.
        *args: its arguments, the same for all ranks.
        nprocs: the number of ranks.
        timeout: seconds until all must have ended. A little before, those that have not print their stacks.
        launcher: "spawn" for ranks as ``unitrain.spawn`` starts them, "python" for one process that nobody launched,
            the name of a real launcher, or a function for environments of its own making.

    Raises:
        TimeoutError: some rank had not ended in time.
        CommunicationError: a rank died without an exception.
        BaseException: what the first rank to fail raised, caused by its traceback, which names the rank. What the
            ranks printed is printed in any case. Under a real launcher it is a RuntimeError with its exit code.
    """
    if isinstance(launcher, str) and launcher not in _FORKED:
        return _run_under(launcher, fn, args, nprocs, timeout)
    make = _FORKED[launcher] if isinstance(launcher, str) else launcher
    with make(nprocs) as environments, tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank {rank}") for rank in range(nprocs)]
        environments = [{**environ, "RANKS_LOG": str(log)} for environ, log in zip(environments, logs, strict=True)]
        try:
            return run_processes(_rank, (timeout, fn, args), environments, _FORKSERVER, timeout)
        finally:
            for log in logs:
                if log.exists() and (text := log.read_text(errors="replace")):
                    print(f"---- {log.name} ----\n{text}", end="")


@contextmanager
def _unlaunched(nprocs: int) -> Iterator[list[dict[str, str]]]:
    """Give the environment of one process that nobody launched."""
    assert nprocs == 1, "without a launcher there is one process"
    yield [dict(os.environ)]


_FORKED: dict[str, Environments] = {"python": _unlaunched, "spawn": spawn_environments}


def _rank(timeout: float, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with open(os.environ.pop("RANKS_LOG"), "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (for the rest of this process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.dump_traceback_later(0.9 * timeout, file=sys.stderr)
    result = fn(*args)
    # A forked process skips its exit handlers, and with them the end of what a script forgot to close.
    atexit._run_exitfuncs()
    return result


def _run_under(launcher: str, fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, timeout: float) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "work").write_bytes(pickle.dumps(sys.path) + pickle.dumps((fn, args)))
        command = launch_command(launcher, nprocs, ["-m", "unitrain.testing.ranks", folder])
        with running(command, small_mpi_environment()) as process:
            try:
                printed, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as expired:
                raise TimeoutError(f"{launcher}'s ranks did not end within {timeout:g} s") from expired
        print(printed, end="")
        if process.returncode != 0:
            raise RuntimeError(f"{launcher} left with exit code {process.returncode}")
        return [pickle.loads(Path(folder, f"result {rank}").read_bytes()) for rank in range(nprocs)]


def _be_a_launched_rank(folder: Path) -> None:
    with open(folder / "work", "rb") as work:
        sys.path[:] = pickle.load(work)  # before what follows is looked for
        fn, args = pickle.load(work)
    result = fn(*args)
    (folder / f"result {detect(os.environ).rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _be_a_launched_rank(Path(sys.argv[1]))
