"""The hosts that a scheduler (SLURM, PBS, LSF or Flux) has given to the job in which a command runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from unitrain.commands.launchers import Host
from unitrain.commands.toolchain import output_of
from unitrain.errors import UsageError
from unitrain.launch import slurm


def allocated_hosts(environ: Mapping[str, str]) -> list[Host]:
    """Return the hosts of this job, with the number of processes that it has asked for on each; none outside of a job.

    Flux does not tell the number: it is 1.

    Raises:
        UsageError: the scheduler's list of hosts can't be read.
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
        return [Host(name, 1) for name in (output_of("flux", "hostlist", "--expand") or "").split()]
    return []


def _hosts_in_file(variable: str, path: str) -> list[Host]:
    """Return the hosts in a file with a line for each process, which begins with its host."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{variable} is {path!r}, which can't be read: {error.strerror}. Pass --hosts.") from None
    return [Host(*one) for one in Counter(line.split()[0] for line in lines if line.strip()).items()]
