"""``unitrain template``: a job file for a recipe, for a scheduler, an operator or a set of containers."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from textwrap import indent

from unitrain.commands.arguments import after_dashes, path
from unitrain.errors import UsageError


@dataclass(frozen=True)
class Job:
    """What a job file says.

    Args:
        target: path of the script, relative to the folder in which the job starts.
        flags: the script's flags.
        name: name of the job: lower-case letters, digits and dashes, as Kubernetes wants it.
        hosts: number of hosts.
        processes: number of processes of each host.
        gpus: whether each process gets a GPU.
        image: the container image.

    Raises:
        UsageError: a number or the name is out of range.
    """

    target: Path
    flags: Sequence[str]
    name: str
    hosts: int
    processes: int
    gpus: bool
    image: str

    def __post_init__(self) -> None:
        for option, number in (("--hosts", self.hosts), ("--processes", self.processes)):
            if number < 1:
                raise UsageError(f"{option} is {number}, but must be at least 1.")
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", self.name):
            raise UsageError(
                f"{self.name!r} can't be the name of a job: use up to 52 lower-case letters, digits and dashes, a "
                "letter first: --name my-run."
            )

    @property
    def arguments(self) -> list[str]:
        """The script and its flags."""
        return [self.target.as_posix(), *self.flags]


def template(kind: str, job: Job) -> str:
    """Return the text of a job file.

    Args:
        kind: one of ``KINDS``.
        job: what to run.
    """
    return KINDS[kind](job)


def write(path: Path, text: str) -> None:
    """Write a job file, unless there is a file already.

    Raises:
        UsageError: there is one, or it can't be written.
    """
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already: remove it, or choose another --output.") from None
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}.") from None


def default_name(target: Path) -> str:
    """Return a name of a job for a script: that of its file, as far as Kubernetes allows it."""
    words = re.findall(r"[a-z0-9]+", target.stem.lower())
    return "-".join(words).lstrip("-0123456789")[:52].rstrip("-") or "train"


def _filled(file: str, job: Job, **values: object) -> str:
    text = (files("unitrain.commands") / "templates" / f"{file}.template").read_text()
    common = {"target": job.target.as_posix(), "name": job.name, "hosts": job.hosts, "processes": job.processes}
    filled = Template(text).substitute({**common, "image": json.dumps(job.image), **values})
    return re.sub(r"\n\s*\n(?=[ \w])", "\n", filled) if file.endswith(".yaml") else filled


def _slurm(job: Job) -> str:
    gpus = f"#SBATCH --gpus-per-node={job.processes}\n" if job.gpus else ""
    return _filled("slurm.sh", job, gpus=gpus, command=shlex.join(["python", *job.arguments]))


def _pytorchjob(job: Job) -> str:
    pod = _filled(
        "pytorchjob.pod.yaml",
        job,
        command=_container_command(["torchrun", *job.arguments]),
        gpus=_pod_gpus(job, " " * 8),
    )
    pod = indent(pod.rstrip(), " " * 6)
    workers = f"    Worker:\n      replicas: {job.hosts - 1}\n{pod}" if job.hosts > 1 else ""
    return _filled("pytorchjob.yaml", job, pod=pod, workers=workers)


def _mpijob(job: Job) -> str:
    # The operator tells mpirun the hosts. unitrain run passes signals to the ranks, so that they save and stop.
    start = ["unitrain", "run", "--", "mpirun", "-np", str(job.hosts * job.processes), "--bind-to", "none"]
    command = _container_command([*start, "python", *job.arguments])
    return _filled("mpijob.yaml", job, command=command, gpus=_pod_gpus(job, " " * 14))


def _container_command(words: list[str]) -> str:
    return json.dumps(words).replace("$(", "$$(")  # else $(NAME) would be a variable


def _pod_gpus(job: Job, space: str) -> str:
    return f"{space}resources:\n{space}  limits: {{nvidia.com/gpu: {job.processes}}}" if job.gpus else ""


def _compose(job: Job) -> str:
    start = ["torchrun", f"--nnodes={job.hosts}", f"--nproc-per-node={job.processes}"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", f"--rdzv-id={job.name}"]
    command = json.dumps([*start, *meeting, *job.arguments]).replace("$", "$$")  # else $NAME would be a variable
    services = "".join(_compose_service(job, number) for number in range(job.hosts))
    return _filled("compose.yaml", job, command=command, services=services.rstrip())


def _compose_service(job: Job, number: int) -> str:
    service = f"  node{number}:\n    <<: *node\n    hostname: node{number}\n"
    if not job.gpus:
        return service
    first = number * job.processes
    device = {"driver": "nvidia", "device_ids": [str(first + i) for i in range(job.processes)], "capabilities": ["gpu"]}
    return f"{service}    deploy:\n      resources:\n        reservations:\n          devices: {json.dumps([device])}\n"


def _ray(job: Job) -> str:
    world_size = job.hosts * job.processes
    return _filled(
        "ray.py",
        job,
        script=json.dumps(job.target.as_posix()),
        flags=json.dumps(list(job.flags)),
        world_size=world_size,
        use_gpu=job.gpus,
    )


KINDS: dict[str, Callable[[Job], str]] = {
    "compose": _compose,
    "mpijob": _mpijob,
    "pytorchjob": _pytorchjob,
    "ray": _ray,
    "slurm": _slurm,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = "unitrain template [OPTION ...] KIND TARGET [-- FLAG ...]"
    parser.add_argument(
        "--hosts", type=int, default=2, metavar="N", help="number of hosts, or of pods (default: %(default)s)"
    )
    parser.add_argument(
        "--processes", type=int, default=8, metavar="N", help="number of processes of each host (default: %(default)s)"
    )
    parser.add_argument("--no-gpus", action="store_true", help="don't ask for a GPU for each process")
    parser.add_argument(
        "--image",
        default="unitrain:cuda",
        metavar="NAME",
        help="container image with the script (default: %(default)s)",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the job (default: that of the script)")
    parser.add_argument("--output", "-o", type=path, metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument(
        "kind", choices=["compose", "mpijob", "pytorchjob", "ray", "slurm"], metavar="KIND", help="%(choices)s"
    )
    parser.add_argument(
        "target", type=path, metavar="TARGET", help="path of the script, from the folder in which the job starts"
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAG", help="flags for the script")
    parser.set_defaults(run=_run_command)


def _run_command(arguments: argparse.Namespace) -> int:
    job = Job(
        arguments.target,
        after_dashes(arguments.flags),
        name=arguments.name or default_name(arguments.target),
        hosts=arguments.hosts,
        processes=arguments.processes,
        gpus=not arguments.no_gpus,
        image=arguments.image,
    )
    text = template(arguments.kind, job)
    if arguments.output is None:
        print(text, end="")
    else:
        write(arguments.output, text)
    return 0
