"""What SLURM's variables mean: whether they describe this process, and where the first task of its step can be met."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Steps that SLURM numbers from the top run shells and batch scripts, not tasks of a job (slurm.h: NO_VAL minus 2 to 6).
_SPECIAL_STEPS = {str(step) for step in range(0xFFFF_FFF0, 0x1_0000_0000)}

MOST_IDS = 0xFFFF_FFFF
"""The largest number of a job or a step that SLURM can give."""

PORTS = range(20000, 30000)
"""Where ``step_port`` lies: below the ephemeral ports of Linux, above those of most services."""


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM started this process as a task of a step (``srun COMMAND``).

    No step is a batch script or the shell of ``salloc``, whatever SLURM_PROCID and SLURM_NTASKS say there. The
    interactive shell of ``salloc`` or of ``srun --pty`` with one task is one for SLURM, but a place where one works
    as on any machine, so it does not count either. The shell of ``srun --pty -n 2`` can't be told from a job of two
    tasks that was given a terminal and is taken for one; UNITRAIN_LAUNCHER=python runs a script alone there.
    """
    # Of a step, SLURM tells the number of tasks too: its number alone can be missing, but must not.
    if environ.get("SLURM_STEP_ID") in _SPECIAL_STEPS or not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & set(environ):
        return False
    return not (environ.get("SLURM_STEP_NUM_TASKS") == "1" and "SLURM_PTY_PORT" in environ)


def first_host(nodes: str) -> str:
    """Return the first host of a node list in SLURM's notation: ``gpu[03-05,9],cpu1`` gives ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def step_port(job: int, step: int, reserved: str | None = None) -> int:
    """Return the port where the ranks of a step meet.

    It is the first of those that ``srun --resv-ports`` reserved (``12000-12001``), else one of ``PORTS`` that every
    task works out alike. A job's steps, and jobs with numbers near to one another, get different ones.
    """
    if reserved:
        return int(re.split("[-,]", reserved)[0])
    return PORTS.start + (job * 16 + step) % len(PORTS)
