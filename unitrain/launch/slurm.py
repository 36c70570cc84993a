"""SLURM's environment variables: whether they describe this process, and the host and port for the rendezvous."""

from __future__ import annotations

import re
from collections.abc import Mapping

# The highest step ids are those of batch scripts and shells, not of tasks of a job (slurm.h: NO_VAL minus 2 to 6).
_SPECIAL_STEPS = {str(step) for step in range(0xFFFF_FFF0, 0x1_0000_0000)}

MOST_IDS = 0xFFFF_FFFF
"""The largest job or step id of SLURM."""

PORTS = range(20000, 30000)
"""Range of ``step_port``: below Linux's ephemeral ports, above those of most services."""


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


def first_host(nodes: str) -> str:
    """Return the first host of a node list in SLURM's format: ``gpu[03-05,9],cpu1`` gives ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def step_port(job: int, step: int, reserved: str | None = None) -> int:
    """Return the port for the rendezvous of a step.

    It is the first port reserved by ``srun --resv-ports`` (``12000-12001``), else one of ``PORTS``, computed from the
    ids of job and step. The steps of a job, and jobs with close ids, get different ports.
    """
    if reserved:
        return int(re.split("[-,]", reserved)[0])
    return PORTS.start + (job * 16 + step) % len(PORTS)
