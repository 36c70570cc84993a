"""Checks and tests the installed Horovod in child processes, since a broken build may crash them."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import NamedTuple

from unitrain.errors import BackendError
from unitrain.launch.local.launchers import launch_command
from unitrain.launch.local.toolchain import PROBE_S, run_to_end, small_mpi_environment

_TEST_SECONDS = 180.0

# Without its C extension, horovod.torch can be imported, prints a warning on stdout, and has no such functions.
_CAPABILITIES = """
import json
import horovod
import horovod.torch as hvd
built = {name: bool(getattr(hvd, f"{name}_built", bool)()) for name in ("mpi", "gloo", "nccl")}
print(json.dumps({"version": horovod.__version__, **built}))
"""

# NCCL refuses two processes on one GPU, so its operations are tested only with two GPUs.
_TEST = """
import sys
import torch
import horovod.torch as hvd
hvd.init()
on_gpu = hvd.nccl_built() and torch.cuda.device_count() >= 2
device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0], device=device), op=hvd.Sum, name="test").item()
controller = "mpi" if hvd.mpi_enabled() else "gloo"
hvd.shutdown()
if (total, controller) != (3.0, sys.argv[1]):
    sys.exit(f"allreduce of 1 and 2 gave {total} over {controller}; 3.0 over {sys.argv[1]} was expected")
"""


class HorovodBuild(NamedTuple):
    """The features that the installed Horovod was built with.

    Attributes:
        version: with the label of the wheel, if UniTrain has built it.
        nccl: whether it has GPU operations.
    """

    version: str
    controllers: tuple[str, ...]
    """mpi, gloo or both; empty if its C extension is missing."""
    nccl: bool

    def __str__(self) -> str:
        return f"controllers: {', '.join(self.controllers)}; operations: {'CPU and NCCL' if self.nccl else 'CPU'}"


def find_horovod() -> HorovodBuild | None:
    """Return the features of the installed Horovod; None without one.

    Imports Horovod and torch in a child process, which takes seconds.

    Raises:
        BackendError: it can't be imported.
    """
    if find_spec("horovod") is None:
        return None
    code, output = run_to_end(sys.executable, "-c", _CAPABILITIES, timeout_s=PROBE_S)
    lines = output.strip().splitlines() or [f"exit code {code}"]
    if code:
        raise BackendError(f"Horovod is installed, but can't be imported: {lines[-1]}")
    # Other libraries may have printed before, and after.
    answer = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return HorovodBuild(answer["version"], tuple(filter(answer.get, ("mpi", "gloo"))), answer["nccl"])


def check_allreduce(controller: str) -> None:
    """Check that an allreduce over two processes works.

    Args:
        controller: mpi or gloo. It decides which launcher starts the processes.

    Raises:
        BackendError: the launcher is missing, the processes fail, or the sum is wrong.
    """
    # Many of the failures are crashes. faulthandler shows where.
    test = ["-X", "faulthandler", "-c", _TEST, controller]
    command = launch_command("mpirun" if controller == "mpi" else "horovodrun", 2, test)
    code, output = run_to_end(*command, environment=small_mpi_environment(), timeout_s=_TEST_SECONDS)
    if code:
        lines = output.strip().splitlines()[-40:]  # at the end is horovodrun's traceback
        shown = "\n".join([*lines, f"exit code {code}"])
        raise BackendError(
            f"Horovod was installed, but an allreduce over two processes with its {controller} controller failed: "
            f"{' '.join(command[:4])} … printed\n{shown}"
        )
