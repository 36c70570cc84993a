"""SLURM's environment variables: whether they describe this process, and the host and port for the rendezvous."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product

# The highest step ids are those of batch scripts and shells, not of tasks of a job (slurm.h: NO_VAL minus 2 to 6).
_SPECIAL_STEPS = {str(step) for step in range(0xFFFF_FFF0, 0x1_0000_0000)}

MOST_IDS = 0xFFFF_FFFF
"""The largest job or step id of SLURM."""

PORTS = range(20000, 30000)
"""Range of ``step_port``: below Linux's ephemeral ports, above those of most services."""

_STEPS = 101


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM started this process as a task of a step (``srun COMMAND``).

    A batch script and the shell of ``salloc`` are not tasks of a step, even if SLURM_PROCID and SLURM_NTASKS are set
    there. The interactive shell of ``salloc`` or of ``srun --pty`` with one task is a step for SLURM, but does not
    count as one either: scripts run there as on any machine. The shell of ``srun --pty -n 2`` can't be distinguished
    from a job of two tasks with a terminal, and counts as a step; UNITRAIN_LAUNCHER=python runs a script alone there.
    """
    # SLURM sets both variables in a step. One of them is enough here, so that a missing one is reported later.
    if environ.get("SLURM_STEP_ID") in _SPECIAL_STEPS or not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & set(environ):
        return False
    return not (environ.get("SLURM_STEP_NUM_TASKS") == "1" and "SLURM_PTY_PORT" in environ)


def hosts(nodes: str) -> list[str]:
    """Return the hosts of a node list in SLURM's format: ``gpu[03-05],cpu1`` gives ``gpu03, gpu04, gpu05, cpu1``."""
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        texts = re.split(r"\[([^\]]*)\]", part)  # every second one was in brackets
        choices = [_numbers(text) if place % 2 else [text] for place, text in enumerate(texts)]
        found += ["".join(chosen) for chosen in product(*choices)]
    return found


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of ``03-05,9``; what is not a range of up to six digits stays as it is."""
    found: list[str] = []
    for one in ranges.split(","):
        bounds = re.fullmatch(r"(\d{1,6})-(\d{1,6})", one, re.ASCII)
        if bounds is None:
            found.append(one)
        else:
            found += [str(n).zfill(len(bounds[1])) for n in range(int(bounds[1]), int(bounds[2]) + 1)]
    return found


def first_host_of_groups(nodes: str, groups: Sequence[str]) -> str | None:
    """Return rank 0's host in a heterogeneous job: the first of the first group that has a part in the step.

    Args:
        nodes: the step's node list, which SLURM sorts by name, so that its first host need not be rank 0's.
        groups: the node lists of the job's groups, in order.
    """
    taking_part = set(hosts(nodes))
    return next((host for group in groups for host in hosts(group) if host in taking_part), None)


def step_port(job: int, step: int, reserved: str | None = None) -> int:
    """Return the port for the rendezvous of a step.

    It is the first port reserved by ``srun --resv-ports`` (``12000-12001``), else one of ``PORTS``, computed from the
    ids of job and step. The first 101 steps of jobs with close ids get different ports. Of two jobs with distant ids,
    one in 10,000 pairs get the same, since 101 and the number of ports have no common divisor.
    """
    if reserved:
        return int(re.split("[-,]", reserved)[0])
    return PORTS.start + (job * _STEPS + step) % len(PORTS)
