"""``unitrain launch``: the command that starts a script on one or several hosts with a launcher, run or printed."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from unitrain.commands.arguments import AfterDashes, path
from unitrain.commands.spare import run_with_spare
from unitrain.errors import UsageError
from unitrain.launch.allocation import Host, allocated_hosts
from unitrain.launch.local.launchers import launcher_options
from unitrain.launch.local.toolchain import search_path

_PROCESSES = 2


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts in a list such as ``node1:8,node2:8``, as mpirun and horovodrun take it."""
    hosts = []
    for part in text.split(","):
        found = re.fullmatch(r"([\w.-]+)(?::([1-9]\d{0,5}))?", part.strip(), re.ASCII)
        if found is None:
            raise UsageError(
                f"--hosts is {text!r}, but must be names of hosts with their numbers of processes, such as "
                "node1:8,node2:8."
            )
        hosts.append(Host(found[1], int(found[2] or 1)))
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise UsageError(f"--hosts is {text!r}, but names a host twice: give each its number of processes once.")
    return hosts


def launch(
    target: Path,
    flags: Sequence[str],
    *,
    launcher: str | None,
    hosts: str | None,
    processes: int | None,
    spare: int,
    max_restarts: int,
    dry_run: bool,
) -> int:
    """Run a job, which replaces this process, or print the command that starts it, and return the exit code.

    torchrun has a command for each host. ``hosts`` are the scheduler's by default. For ``spare``: ``run_with_spare``.
    """
    if processes is not None and processes < 1:
        raise UsageError(f"--processes is {processes}, but must be at least 1.")
    listed = parse_hosts(hosts) if hosts is not None else []
    in_job = allocated_hosts(os.environ) if hosts is None else []
    if len(in_job) == 1:  # this one
        processes = processes or in_job[0].processes
    elif in_job:
        listed = [Host(host.name, processes or host.processes) for host in in_job]
        launcher = launcher or ("srun" if "SLURM_JOB_ID" in os.environ else "mpirun")
    launcher = launcher or "torchrun"
    over_ssh, used = launcher in ("mpirun", "horovodrun"), listed[: len(listed) - spare]
    if (spare or max_restarts) and not (over_ssh and 0 < spare < len(listed) and max_restarts > 0):
        raise UsageError(
            f"--spare {spare} --max-restarts {max_restarts} with {launcher} on {len(listed)} hosts: both must be >= 1, "
            "--spare less than the number of hosts, and --launcher mpirun or horovodrun. Otherwise, take unitrain run."
        )
    script = [*([] if launcher == "torchrun" else ["python"]), str(target), *flags]
    commands = [[*options, *script] for options in launcher_options(launcher, used, processes or _PROCESSES)]
    if not dry_run:
        if len(commands) > 1:
            raise UsageError(
                f"{launcher} is started on each host. --dry-run prints the commands; or use mpirun, horovodrun or srun."
            )
        os.environ["PATH"] = search_path()
        if spare:
            return run_with_spare(launcher, listed, spare, script, max_restarts)
        os.execvp(commands[0][0], commands[0])
    for number, command in enumerate(commands):
        if len(commands) > 1:
            print(f"# on {listed[number].name}")
        print(shlex.join(command))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = "unitrain launch [OPTION ...] TARGET [-- FLAG ...]"
    parser.add_argument(
        "--launcher",
        choices=["torchrun", "mpirun", "horovodrun", "srun"],
        metavar="NAME",
        help="torchrun, mpirun, horovodrun or srun (default: torchrun; mpirun or srun in a scheduler's job on several "
        "hosts)",
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--hosts",
        metavar="LIST",
        help="hosts and their numbers of processes: node1:8,node2:8 (default: those of the job of SLURM, PBS, LSF or "
        "Flux)",
    )
    place.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help=f"number of processes on this host, or on each host of the job (default: the job's, or {_PROCESSES})",
    )
    parser.add_argument(
        "--spare", type=int, default=0, metavar="N", help="the last N hosts replace those that are lost"
    )
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="with --spare: number of restarts")
    parser.add_argument("--dry-run", action="store_true", help="print the command, and start nothing")
    parser.add_argument("target", type=path, metavar="TARGET", help="path of the script, the same on every host")
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, action=AfterDashes, metavar="FLAG", help="flags for the script"
    )
    parser.set_defaults(run=launch)
