"""The hosts that a scheduler (SLURM, PBS, LSF or Flux) has given to the job of this process."""

from __future__ import annotations

import socket
import subprocess
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from unitrain.errors import LaunchError
from unitrain.launch import slurm
from unitrain.launch.detect import Launch
from unitrain.launch.network.addresses import addresses_of, is_here
from unitrain.launch.network.tcp_store import LOOPBACK

_ANSWER_S = 30.0


def allocated_hosts(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the hosts of this job in order, each with its slots, or 1 where they are not told; none outside a job.

    Args:
        environ: the environment of a process of the job.

    Raises:
        LaunchError: the scheduler names a file that can't be read.
    """
    if "SLURM_JOB_NODELIST" in environ:
        return dict.fromkeys(slurm.hosts(environ["SLURM_JOB_NODELIST"]), 1)
    for variable in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        if variable in environ:
            return _hosts_in_file(variable, environ[variable])
    if "LSB_MCPU_HOSTS" in environ:
        words = environ["LSB_MCPU_HOSTS"].split()
        # The list is of hosts and slots in turn: host1 4 host2 4.
        return dict(zip(words[::2], map(int, words[1::2]), strict=False))
    # Flux sets no variable with its hosts. Its command asks the broker of the job, which is on this host.
    if "FLUX_URI" in environ:
        listing = ["flux", "hostlist", "--expand"]
        with suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(listing, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
            return dict.fromkeys(listed.stdout.split(), 1)
    return {}


def _hosts_in_file(variable: str, path: str) -> dict[str, int]:
    """Return the hosts in a file with a line for each slot, which begins with its host."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise LaunchError(
            f"{variable} is {path!r}, which can't be read ({error.strerror}), so the first host of the job is not "
            "known: set MASTER_ADDR and MASTER_PORT to an address of rank 0's host."
        ) from None
    # A Counter keeps the order of the first lines, which is that of the ranks.
    return Counter(line.split()[0] for line in lines if line.strip())


def address_of_rank_0(launch: Launch, environ: Mapping[str, str]) -> str | None:
    """Return host:port for the rendezvous of a job, from the scheduler's hosts and its id; None without these.

    Every rank computes the same address, so that none has to be told.

    Args:
        launch: how this process was started. Its ``step`` is the id that the port is computed from.
        environ: the environment of this process.

    Raises:
        LaunchError: rank 0 is not on the host that the others would look for it, or a file can't be read.
    """
    if launch.step is None:
        return None
    # Jobs that share a host get different ports with high probability: there are 10,000.
    port = slurm.PORTS.start + zlib.crc32(launch.step.encode()) % len(slurm.PORTS)
    if launch.local_world_size == launch.world_size:
        return f"{LOOPBACK}:{port}"
    hosts = allocated_hosts(environ)
    if not hosts:
        return None
    # Some sites of LSF list the host of the batch script first, with one slot, where jsrun starts no rank.
    slots = list(hosts.values())
    batch_first = "LSB_JOBID" in environ and len(slots) > 1 and slots[0] == 1 < slots[1]
    host = list(hosts)[batch_first]
    if launch.rank == 0 and addresses_of(host) and not is_here(host):
        raise LaunchError(
            f"the ranks would meet at {host}, the first host of the scheduler's list, but rank 0 is on "
            f"{socket.gethostname()}. Set MASTER_ADDR and MASTER_PORT, or install mpi4py with the site's MPI."
        )
    return f"{host}:{port}"
