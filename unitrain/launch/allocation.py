"""The hosts that a scheduler (SLURM, PBS, LSF or Flux) has given to the job in which this process runs."""

from __future__ import annotations

import re
import socket
import subprocess
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unitrain.errors import LaunchError
from unitrain.launch import slurm
from unitrain.launch.detect import Launch
from unitrain.launch.network.addresses import addresses_of, is_here
from unitrain.launch.network.tcp_store import LOOPBACK

_ANSWER_S = 30.0


@dataclass(frozen=True)
class Host:
    """A host of a job, and the number of processes on it."""

    name: str
    processes: int


def allocated_hosts(environ: Mapping[str, str]) -> list[Host]:
    """Return the hosts of this job, with the number of processes that it has asked for on each; none outside of a job.

    Flux does not tell the number: it is 1.
    """
    if "SLURM_JOB_NODELIST" in environ:
        names = slurm.hosts(environ["SLURM_JOB_NODELIST"])
        tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_TASKS_PER_NODE", ""))  # such as 8(x2),4
        each = [int(number) for number, times in tasks for _ in range(int(times or 1))] or [1] * len(names)
        return [Host(*one) for one in zip(names, each, strict=False)]
    for variable in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        if variable in environ:
            return _hosts_in_file(variable, environ[variable])
    if "LSB_MCPU_HOSTS" in environ:
        words = environ["LSB_MCPU_HOSTS"].split()
        return [Host(name, int(number)) for name, number in zip(words[::2], words[1::2], strict=False)]
    if "FLUX_URI" in environ:
        listing = ["flux", "hostlist", "--expand"]
        with suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(listing, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
            return [Host(name, 1) for name in listed.stdout.split()]
    return []


def _hosts_in_file(variable: str, path: str) -> list[Host]:
    """Return the hosts in a file with a line for each process, which begins with its host."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise LaunchError(
            f"{variable} is {path!r}, unreadable ({error.strerror}): pass --hosts, or set MASTER_ADDR and MASTER_PORT."
        ) from None
    return [Host(*one) for one in Counter(line.split()[0] for line in lines if line.strip()).items()]


def address_of_rank_0(launch: Launch, environ: Mapping[str, str]) -> str | None:
    """Return host:port for the rendezvous of a job, from the scheduler's hosts and its id; None without these."""
    if launch.step is None:
        return None
    port = slurm.PORTS.start + zlib.crc32(launch.step.encode()) % len(slurm.PORTS)
    if launch.local_world_size == launch.world_size:
        return f"{LOOPBACK}:{port}"
    hosts = allocated_hosts(environ)
    if not hosts:
        return None
    # Some sites of LSF list the host of the batch script first, with one slot, where jsrun starts no rank.
    batch_first = "LSB_JOBID" in environ and len(hosts) > 1 and hosts[0].processes == 1 < hosts[1].processes
    host = hosts[batch_first].name
    if launch.rank == 0 and addresses_of(host) and not is_here(host):
        raise LaunchError(
            f"the ranks would meet at {host}, the first host of the scheduler's list, but rank 0 is on "
            f"{socket.gethostname()}. Set MASTER_ADDR and MASTER_PORT, or install mpi4py with the site's MPI."
        )
    return f"{host}:{port}"
