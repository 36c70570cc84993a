"""What the installed Horovod can do, asked in child processes: a broken build may crash whoever loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from unitrain.commands.toolchain import attempt, find_program, running, small_mpi_environment
from unitrain.errors import BackendError

_PROOF_SECONDS = 180.0

# horovod.torch imports without its C extension, with a warning on stdout; then it has no init.
_CAPABILITIES = """
import json
import horovod
import horovod.torch as hvd
if hasattr(hvd, "init"):
    built = {"mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built())}
else:
    built = None
print(json.dumps({"version": horovod.__version__, "built": built}))
"""

# NCCL refuses two processes on one GPU, so its operations are proved where there are two.
_PROOF = """
import sys
import torch
import horovod.torch as hvd
hvd.init()
on_gpu = hvd.nccl_built() and torch.cuda.device_count() >= 2
device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0], device=device), op=hvd.Sum, name="proof").item()
controller = "mpi" if hvd.mpi_enabled() else "gloo"
hvd.shutdown()
if (total, controller) != (3.0, sys.argv[1]):
    sys.exit(f"allreduce of 1 and 2 gave {total} over {controller}; 3.0 over {sys.argv[1]} was expected")
"""


@dataclass(frozen=True)
class HorovodBuild:
    """What the installed Horovod was built with."""

    version: str
    controllers: tuple[str, ...]
    """mpi, gloo, both or none; none means that its C extension is missing."""
    nccl: bool


def find_horovod() -> HorovodBuild | None:
    """Return what the installed Horovod can do, or None where there is no Horovod.

    Raises:
        BackendError: Horovod is installed but can't be loaded.
    """
    if find_spec("horovod") is None:
        return None
    worked, said = attempt(sys.executable, "-c", _CAPABILITIES)
    lines = said.strip().splitlines() or ["it says nothing"]
    if not worked:
        raise BackendError(f"Horovod is installed but can't be loaded: {lines[-1]}")
    answer = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    built = answer["built"] or {}
    controllers = tuple(name for name in ("mpi", "gloo") if built.get(name))
    return HorovodBuild(answer["version"], controllers, built.get("nccl", False))


def prove(controller: str) -> None:
    """Run an allreduce over two processes under ``controller`` (``"mpi"`` or ``"gloo"``).

    Raises:
        BackendError: The processes did not start, did not end in time, or computed something else.
    """
    launcher = {"mpi": ["mpirun"], "gloo": ["horovodrun", "--gloo"]}[controller]
    program = find_program(launcher[0])
    if program is None:
        raise BackendError(f"{launcher[0]} is not installed, so Horovod's {controller} controller can't be proved.")
    command = [str(program), *launcher[1:], "-np", "2", sys.executable, "-X", "faulthandler", "-c", _PROOF, controller]
    output = _run_to_end(command)
    if output is not None:
        raise BackendError(
            f"Horovod was installed, but an allreduce over two processes with its {controller} controller failed: "
            f"{' '.join(command[:4])} … said\n{output}"
        )


def _run_to_end(command: list[str]) -> str | None:
    """Run ``command`` and return None, or the end of what it said if it failed or had to be stopped."""
    try:
        with running(command, small_mpi_environment()) as process:
            output, _ = process.communicate(timeout=_PROOF_SECONDS)
    except subprocess.TimeoutExpired:
        return f"nothing in {_PROOF_SECONDS:.0f} s, so it was stopped"
    if process.returncode == 0:
        return None
    lines = output.strip().splitlines()
    # horovodrun puts [rank] before what the processes say, and a traceback of its own after it.
    of_the_processes = [line for line in lines if line.startswith("[")]
    return "\n".join([*(of_the_processes or lines)[-20:], f"exit status {process.returncode}"])
