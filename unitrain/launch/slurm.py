"""SLURM's environment variables: whether they describe this process, and the host and port for the rendezvous."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product

from unitrain.launch.variables import Variables, is_host

# The highest step ids belong to batch scripts and shells, not to tasks of a job (slurm.h: NO_VAL minus 2 to 6).
_SPECIAL_STEPS = {str(step) for step in range(0xFFFF_FFF0, 0x1_0000_0000)}

_MOST_IDS = 0xFFFF_FFFF  # the largest job or step id

PORTS = range(20000, 30000)
"""Range of ``step_port``: below Linux's ephemeral ports, above most services."""

_STEPS = 101  # how many steps of a job get different ports; see ``step_port``


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
    """Return the hosts of a node list in SLURM's format.

    Args:
        nodes: such as ``gpu[03-05],cpu1``, which gives ``gpu03, gpu04, gpu05, cpu1``.
    """
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        texts = re.split(r"\[([^\]]*)\]", part)  # every second one was in brackets
        choices = [_numbers(text) if place % 2 else [text] for place, text in enumerate(texts)]
        names += ["".join(chosen) for chosen in product(*choices)]
    return names


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of ``03-05,9``; parts that are not a range of up to six digits are returned unchanged."""
    numbers: list[str] = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"(\d{1,6})-(\d{1,6})", part, re.ASCII)
        if bounds is None:
            numbers.append(part)
        else:
            numbers += [str(n).zfill(len(bounds[1])) for n in range(int(bounds[1]), int(bounds[2]) + 1)]
    return numbers


def first_host_of_groups(nodes: str, groups: Sequence[str]) -> str | None:
    """Return rank 0's host in a heterogeneous job: the first of the first group that has a part in the step.

    SLURM sorts ``nodes``, the step's list, by name, so its first host need not be rank 0's.

    Args:
        nodes: the hosts of the step.
        groups: the hosts of each group of the job, in order.
    """
    taking_part = set(hosts(nodes))
    return next((host for group in groups for host in hosts(group) if host in taking_part), None)


def step_ids(variables: Variables) -> tuple[int, int]:
    """Return the ids of job and step."""
    return variables.integer("SLURM_JOB_ID", 0, _MOST_IDS), variables.integer("SLURM_STEP_ID", 0, _MOST_IDS)


def tasks_here(variables: Variables) -> int:
    """Return the number of tasks on this node."""
    rank = str(variables.integer("SLURM_PROCID"))
    wanted = f"a list of the tasks on this node that contains SLURM_PROCID, {rank!r}"
    tasks = variables.matching("SLURM_GTIDS", r"\d+(,\d+)*", wanted).split(",")
    # The variables are of another process: they were inherited, or copied by hand.
    if rank not in tasks:
        raise variables.error("SLURM_GTIDS", wanted)
    return len(tasks)


def step_address(variables: Variables, *, several_hosts: bool) -> str:
    """Return host:port for the rendezvous of a step.

    Args:
        variables: SLURM's variables, which are recorded as the evidence.
        several_hosts: whether the step has tasks on several hosts.
    """
    job, step = step_ids(variables)
    nodes = _nodes(variables, "SLURM_STEP_NODELIST")
    # A node's name may not resolve outside SLURM, so it is used only if there are several nodes.
    host = _host_of_rank_0(variables, nodes, job) if several_hosts else "127.0.0.1"
    return f"{host}:{step_port(job, step)}"


def _nodes(variables: Variables, name: str) -> str:
    """Read a variable with a list of nodes."""
    wanted = "a list of nodes, like node[1-4]"
    nodes = variables.string(name, wanted)
    if not is_host(next(iter(hosts(nodes)), "")):
        raise variables.error(name, wanted)
    return nodes


def _host_of_rank_0(variables: Variables, nodes: str, job: int) -> str:
    """Return the host of a step of several nodes on which rank 0 is: the first, except in a heterogeneous job."""
    if "SLURM_HET_SIZE" not in variables:
        return hosts(nodes)[0]
    # Up to SLURM 22.05, srun without an allocation uses the older word.
    word = "PACK" if "SLURM_JOB_ID_PACK_GROUP_0" in variables and "SLURM_JOB_ID_HET_GROUP_0" not in variables else "HET"
    leader = variables.integer(f"SLURM_JOB_ID_{word}_GROUP_0", 0, _MOST_IDS)
    if leader != job:  # another job's variables: this one was submitted from inside it
        return hosts(nodes)[0]
    names = [f"SLURM_JOB_NODELIST_{word}_GROUP_{n}" for n in range(variables.integer("SLURM_HET_SIZE", 1))]
    host = first_host_of_groups(nodes, [_nodes(variables, name) for name in names])
    if host is None:
        raise variables.error(names[0], "a list of nodes that this step shares")
    return host


def step_port(job: int, step: int) -> int:
    """Return the port for the rendezvous of a step: one of ``PORTS``, computed from the ids of job and step.

    The first 101 steps of jobs with close ids get different ones; of distant jobs, one in 10,000 pairs gets the same,
    since 101 and the number of ports have no common divisor.
    """
    return PORTS.start + (job * _STEPS + step) % len(PORTS)
