"""``run_ranks``: runs a function as the ranks of a job, in new processes, as fast as a unit test.

The processes are forked from a server that has imported torch, so they start in 0.1 s instead of 3 s. They end with the
call. The function is pickled, so it must be at the top level of a module. It calls ``unitrain.init``, as a script does.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from unitrain.job.starting.spawn import run_processes, spawn_environments
from unitrain.launch.detect import detect
from unitrain.launch.local.launchers import launch_command
from unitrain.launch.local.toolchain import running, small_mpi_environment

Environments: TypeAlias = Callable[[int], AbstractContextManager[list[dict[str, str]]]]
"""Takes a number of ranks, and returns a context manager that gives the complete environment of each."""
Launcher: TypeAlias = str | Environments
"""What starts the ranks: "python", "spawn" or a function that makes their environments, in a fraction of a second; or
the name of a real launcher, in seconds."""

_FORKSERVER = multiprocessing.get_context("forkserver")
# pytest: every child imports the parent's main module. torch's compiler: an optimizer's first step imports it (2 s).
_PRELOADED = [
    "pytest", "torch._dynamo", "torch._inductor", "unitrain.initialize", "unitrain.data", "unitrain.testing.duties",
]  # fmt: skip


def preload(modules: Sequence[str]) -> None:
    """Have the server import modules, so that not every rank has to.

    Args:
        modules: names of modules, imported after torch. Without effect once the first rank has been started.
    """
    _FORKSERVER.set_forkserver_preload([*_PRELOADED, *modules, "unitrain.testing.preloaded"])


preload([])


def run_ranks(
    fn: Callable[..., Any], *args: Any, nprocs: int = 2, timeout: float = 60, launcher: Launcher = "spawn"
) -> list[Any]:
    """Run ``fn(*args)`` on each of ``nprocs`` ranks, and return the results in rank order.

    The ranks' output is printed, whether they fail or not.

    Args:
        fn: a function at the top level of a module.
        *args: its arguments, the same on all ranks.
        nprocs: number of ranks.
        timeout: time limit in seconds. Shortly before, ranks that still run print their stacks.
        launcher: "spawn" for ranks as ``unitrain.spawn`` starts them, "python" for one process without a launcher, the
            name of a real launcher, or a function that makes the ranks' environments.

    Raises:
        TimeoutError: a rank did not end in time; under a real launcher, subprocess.TimeoutExpired.
        CommunicationError: a rank died without an exception.
        RuntimeError: a real launcher exited with an error.
        BaseException: the exception of the first rank that failed. Its cause has the traceback, and names the rank.
    """
    if isinstance(launcher, str) and launcher not in _FORKED:
        return _run_under(launcher, fn, args, nprocs, timeout)
    make = _FORKED[launcher] if isinstance(launcher, str) else launcher
    with make(nprocs) as environments, logged(environments) as with_logs:
        return run_processes(_rank, (timeout, fn, args), with_logs, _FORKSERVER, timeout)


@contextmanager
def logged(environments: Sequence[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """Add a file for each rank's output to its environment, and print the output in the end.

    Args:
        environments: the environments of the ranks, in order.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank {rank}") for rank in range(len(environments))]
        try:
            yield [{**environ, "RANKS_LOG": str(log)} for environ, log in zip(environments, logs, strict=True)]
        finally:
            for log in logs:
                if log.exists() and (text := log.read_text(errors="replace")):
                    print(f"---- {log.name} ----\n{text}", end="")


@contextmanager
def unlaunched(nprocs: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environment of one process without a launcher."""
    assert nprocs == 1, "without a launcher, there is one process"
    yield [dict(os.environ)]


_FORKED: dict[str, Environments] = {"python": unlaunched, "spawn": spawn_environments}


def _rank(timeout: float, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run the function on a rank that was forked, with its output in a file. Returns the result."""
    with open(os.environ.pop("RANKS_LOG"), "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (for the rest of this process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()  # unitrain.init does, but a rank may crash before
    faulthandler.dump_traceback_later(0.8 * timeout, file=sys.stderr)
    result = fn(*args)
    # A forked process skips its exit handlers, which close what a script did not.
    atexit._run_exitfuncs()
    return result


def _run_under(launcher: str, fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, timeout: float) -> list[Any]:
    """Run the function on ranks that a real launcher starts, and return the results."""
    with tempfile.TemporaryDirectory() as folder:
        # Two pickles: the second can be read only with the path of the first.
        Path(folder, "work").write_bytes(pickle.dumps(sys.path) + pickle.dumps((fn, args)))
        command = launch_command(launcher, nprocs, ["-m", "unitrain.testing.ranks", folder])
        with running(command, {**small_mpi_environment(), "PYTHONFAULTHANDLER": "1"}) as process:
            printed, _ = process.communicate(timeout=timeout)
        print(printed, end="")
        if process.returncode != 0:
            raise RuntimeError(f"{launcher} exited with code {process.returncode}; its output says why")
        return [pickle.loads(Path(folder, f"result {rank}").read_bytes()) for rank in range(nprocs)]


def _run_launched(folder: Path) -> None:
    """Run the function that a folder has, and write the result there. Runs on every rank under a launcher."""
    with open(folder / "work", "rb") as work:
        sys.path[:] = pickle.load(work)  # first, since unpickling the function imports its module
        fn, args = pickle.load(work)
    result = fn(*args)
    (folder / f"result {detect(os.environ).rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _run_launched(Path(sys.argv[1]))
