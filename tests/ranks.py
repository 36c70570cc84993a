"""``run_ranks``: a function run on n ranks, in new processes, at the price of a unit test.

The processes are forked from a server that has torch imported (0.1 s for a test instead of spawn's 3 s), meet without
a fixed port, and never outlive the call. The function is one of a test module's top level, for it is pickled; it calls
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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from unitrain.commands.toolchain import find_program, running, small_mpi_environment
from unitrain.job.spawn import run_processes, spawn_environments

_FORKSERVER = multiprocessing.get_context("forkserver")
# pytest, because every child imports the parent's main module, and this is what that module imports; torch's compiler,
# because the first step of any optimizer imports it (2 s).
_PRELOADED = ["pytest", "torch._dynamo", "torch._inductor", "unitrain.initialize", "unitrain.data"]
# Test modules import them, and with the module each of its ranks would (1 to 3 s).
_PRELOADED_WHERE_USED = ["sklearn.datasets", "torchmetrics"]


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    nprocs: int = 2,
    timeout: float = 60,
    launcher: Literal["spawn", "horovodrun", "mpirun"] = "spawn",
) -> list[Any]:
    """Run ``fn(*args)`` as each of ``nprocs`` ranks and return what each returned.

    Args:
        fn: a function of a module's top level.
        *args: its arguments, the same for all ranks.
        nprocs: the number of ranks.
        timeout: seconds until all must have ended. A little before, those that have not print their stacks.
        launcher: whose environment the ranks find: ``unitrain.spawn``'s or that of horovodrun's gloo controller. With
            mpirun it is the launcher itself that starts them, which takes seconds.

    Raises:
        TimeoutError: some rank had not ended in time.
        CommunicationError: a rank died without an exception.
        BaseException: what the first rank to fail raised, caused by its traceback, which names the rank. What the
            ranks printed is printed in any case. Under mpirun it is a RuntimeError with mpirun's exit code.
    """
    if launcher == "mpirun":
        return _run_under_mpirun(fn, args, nprocs, timeout)
    # Has an effect before the server's start, which is when all test modules have been collected.
    _FORKSERVER.set_forkserver_preload([*_PRELOADED, *(name for name in _PRELOADED_WHERE_USED if name in sys.modules)])
    make = spawn_environments if launcher == "spawn" else _horovodrun_environments
    with make(nprocs) as environments, tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank {rank}") for rank in range(nprocs)]
        environments = [{**environ, "RANKS_LOG": str(log)} for environ, log in zip(environments, logs, strict=True)]
        try:
            return run_processes(_rank, (timeout, fn, args), environments, _FORKSERVER, timeout)
        finally:
            for log in logs:
                if log.exists() and (text := log.read_text(errors="replace")):
                    print(f"---- {log.name} ----\n{text}", end="")


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


@contextmanager
def _horovodrun_environments(nprocs: int) -> Iterator[list[dict[str, str]]]:
    """Do what ``horovodrun --gloo -np N`` does around its processes, but start none."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts  # noqa: TID251
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars  # noqa: TID251
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer  # noqa: TID251

    slots = get_host_assignments(parse_hosts(f"localhost:{nprocs}"), nprocs)
    server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    server.init(slots)
    # Horovod's own way of serving takes 0.5 s to stop.
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    job = create_run_env_vars("127.0.0.1", ["lo"], str(server.server_port))
    try:
        yield [{**os.environ, **job, **create_slot_env_vars(slot)} for slot in slots]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _run_under_mpirun(fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, timeout: float) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "work").write_bytes(pickle.dumps(sys.path) + pickle.dumps((fn, args)))
        command = [str(find_program("mpirun")), "-np", str(nprocs), sys.executable, __file__, folder]
        with running(command, small_mpi_environment()) as mpirun:
            try:
                printed, _ = mpirun.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as expired:
                raise TimeoutError(f"mpirun's ranks did not end within {timeout:g} s") from expired
        print(printed, end="")
        if mpirun.returncode != 0:
            raise RuntimeError(f"mpirun left with exit code {mpirun.returncode}")
        return [pickle.loads(Path(folder, f"result {rank}").read_bytes()) for rank in range(nprocs)]


def _be_a_rank_of_mpirun(folder: Path) -> None:
    with open(folder / "work", "rb") as work:
        sys.path[:] = pickle.load(work)  # before what follows is looked for
        fn, args = pickle.load(work)
    result = fn(*args)
    (folder / f"result {os.environ['OMPI_COMM_WORLD_RANK']}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _be_a_rank_of_mpirun(Path(sys.argv[1]))
