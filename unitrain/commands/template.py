"""``unitrain template``: a job file for a script, for a scheduler, an operator or a set of containers."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from unitrain.commands.arguments import AfterDashes, path
from unitrain.errors import UsageError

_TEMPLATES = (files("unitrain.commands") / "templates").iterdir()
KINDS = {template.name.partition(".")[0]: template for template in sorted(_TEMPLATES, key=lambda one: one.name)}
"""The template of each kind of job."""


def template(**job: Any) -> int:
    """Print the job file that ``job_file`` returns."""
    print(job_file(**job), end="")
    return 0


def job_file(
    kind: str,
    target: Path,
    flags: Sequence[str],
    *,
    name: str | None,
    hosts: int,
    processes: int,
    gpus: bool,
    image: str,
) -> str:
    """Return the text of a job file of one of ``KINDS``. ``processes`` are those of each host."""
    name = default_name(target) if name is None else name
    for option, number in (("--hosts", hosts), ("--processes", processes)):
        if number < 1:
            raise UsageError(f"{option} is {number}, but must be at least 1.")
    script = [target.as_posix(), *flags]
    # The operator tells mpirun the hosts. unitrain run passes signals to the ranks, so that they save and stop.
    mpirun = ["unitrain", "run", "--", "mpirun", "-np", str(hosts * processes), "--bind-to", "none"]
    torchrun = ["torchrun", f"--nnodes={hosts}", f"--nproc-per-node={processes}"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", f"--rdzv-id={name}"]
    worker = f"    Worker:\n      replicas: {hosts - 1}\n      restartPolicy: OnFailure\n      template: *pod\n"
    values = {
        "target": target.as_posix(),
        "name": name,
        "hosts": hosts,
        "processes": processes,
        "ranks": hosts * processes,
        "cpus": 4 * processes,
        "image": json.dumps(image),
        "python_command": shlex.join(["python", *script]),
        "launch_command": shlex.join(["unitrain", "launch", target.as_posix(), *(["--", *flags] if flags else [])]),
        "slurm_gpus": f"#SBATCH --gpus-per-node={processes}\n" if gpus else "",
        "pbs_gpus": f":ngpus={processes}" if gpus else "",
        "lsf_gpus": f'#BSUB -gpu "num={processes}"\n' if gpus else "",
        "flux_gpus_per_slot": " --gpus-per-slot=1" if gpus else "",
        "flux_gpus_per_task": " --gpus-per-task=1" if gpus else "",
        "pod_limits": json.dumps({"nvidia.com/gpu": processes} if gpus else {}),
        "pytorchjob_command": _in_pod(["torchrun", *script]),
        "pytorchjob_worker": worker if hosts > 1 else "",
        "mpijob_command": _in_pod([*mpirun, "python", *script]),
        "compose_command": json.dumps([*torchrun, *script]).replace("$", "$$"),  # else $NAME would be a variable
        "compose_services": "".join(_compose_service(host, processes, gpus) for host in range(hosts)),
        "ray_script": json.dumps(target.as_posix()),
        "ray_flags": json.dumps(list(flags)),
        "ray_use_gpu": gpus,
    }
    return Template(KINDS[kind].read_text()).substitute(values)


def default_name(target: Path) -> str:
    """Return the name of a script's file, as far as Kubernetes allows it as the name of a job."""
    words = re.findall(r"[a-z0-9]+", target.stem.lower())
    return "-".join(words).lstrip("-0123456789")[:52].rstrip("-") or "train"


def _in_pod(command: list[str]) -> str:
    return json.dumps(command).replace("$(", "$$(")  # else $(NAME) would be a variable


def _compose_service(host: int, processes: int, gpus: bool) -> str:
    service = f"  node{host}:\n    <<: *node\n    hostname: node{host}\n"
    if not gpus:
        return service
    ids = [str(host * processes + process) for process in range(processes)]
    devices = [{"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}]
    return f"{service}    deploy: {json.dumps({'resources': {'reservations': {'devices': devices}}})}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = "unitrain template [OPTION ...] KIND TARGET [-- FLAG ...]"
    parser.add_argument(
        "--hosts", type=int, default=2, metavar="N", help="number of hosts, or of pods (default: %(default)s)"
    )
    parser.add_argument(
        "--processes", type=int, default=8, metavar="N", help="number of processes of each host (default: %(default)s)"
    )
    parser.add_argument("--no-gpus", dest="gpus", action="store_false", help="don't ask for a GPU for each process")
    parser.add_argument(
        "--image",
        default="unitrain:cuda",
        metavar="NAME",
        help="container image with the script (default: %(default)s)",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the job (default: the script's)")
    parser.add_argument("kind", choices=list(KINDS), metavar="KIND", help="%(choices)s")
    parser.add_argument(
        "target", type=path, metavar="TARGET", help="path of the script, from the folder in which the job starts"
    )
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, action=AfterDashes, metavar="FLAG", help="flags for the script"
    )
    parser.set_defaults(run=template)
