"""The ``unitrain`` command: parses the command line and calls a subcommand."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from unitrain.errors import UnitrainError
from unitrain.process import occupy_standard_descriptors, print_stderr
from unitrain.url import is_url

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return the exit code."""
    occupy_standard_descriptors()
    arguments = _parser().parse_args(argv)
    # Raised as an exception, SIGTERM also ends the child processes of a subcommand, a compiler say.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        code = int(arguments.run(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UnitrainError as error:
        print_stderr(f"unitrain {arguments.command}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        print_stderr(f"unitrain {arguments.command}: interrupted")
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        _discard_output()
        if error.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE  # the reader has what it wanted: | head
        print_stderr(f"unitrain {arguments.command}: its output can't be written: {error.strerror}")
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _discard_output() -> None:
    """Discard what stdout still holds: Python would try to write it at exit, and fail once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _terminate(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unitrain", description="One PyTorch training script, under every launcher.")
    parser.add_argument("--version", action="version", version=f"unitrain {version('unitrain')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_bench(commands)
    _add_checkpoint(commands)
    _add_conform(commands)
    _add_doctor(commands)
    _add_install_horovod(commands)
    _add_launch(commands)
    _add_run(commands)
    _add_template(commands)
    _add_verify(commands)
    return parser


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def _path(text: str) -> Path:
    """Return a path of a file that commands start or write."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL: pass the path of a file or folder of this machine")
    return Path(text)


def _prefixed(text: str) -> tuple[str, str]:
    """Return the name of an object, and the prefix of its keys, which is the name by default."""
    name, equals, prefix = text.partition("=")
    if not name or "/" in name or name.startswith("_"):
        raise argparse.ArgumentTypeError(f"{text!r} must be the name of an object, or NAME=PREFIX")
    return name, prefix if equals else name


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "measure a recipe with every launcher and backend found here, and recommend settings for it"
    parser = commands.add_parser(
        "bench", help=summary, description=_sentence(summary), usage="unitrain bench [OPTION ...] TARGET [-- FLAG ...]"
    )
    parser.add_argument(
        "--backend", metavar="NAME", help="the only backend to use with several processes (default: all)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="maximum number of processes (default: number of GPUs, else of cores)",
    )
    parser.add_argument(
        "--steps", type=int, default=30, metavar="N", help="optimizer steps per run (default: %(default)s)"
    )
    parser.add_argument("--levers", metavar="NAMES", help="settings to tune, comma-separated, or none (default: all)")
    parser.add_argument(
        "--output", type=_path, default=Path("bench"), metavar="FOLDER", help="output folder (default: %(default)s)"
    )
    parser.add_argument("--no-picture", action="store_true", help="don't draw a picture, which needs matplotlib")
    parser.add_argument("target", type=_path, metavar="TARGET", help="path of a recipe; options of bench go before it")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAG", help="flags for the recipe")
    parser.set_defaults(run=_run_bench)


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "show what is in a checkpoint, write the whole weights in it to one file, or convert it"
    parser = commands.add_parser("checkpoint", help=summary, description=_sentence(summary))
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    path = "folder of a checkpoint, or of checkpoints, whose newest is taken"
    summary = "verify a checkpoint, and list its tensors"
    inspect = actions.add_parser("inspect", help=summary, description=_sentence(summary))
    inspect.add_argument("path", type=_path, metavar="PATH", help=path)
    inspect.set_defaults(run=_run_checkpoint_inspect)
    summary = "write the state of one object to a file, with whole tensors"
    merge = actions.add_parser("merge", help=summary, description=_sentence(summary))
    merge.add_argument("path", type=_path, metavar="PATH", help=path)
    merge.add_argument(
        "-o", "--output", type=_path, metavar="FILE", required=True, help="a .safetensors file, or one for torch.load"
    )
    merge.add_argument("--object", default="model", metavar="NAME", help="name of the object (default: %(default)s)")
    merge.set_defaults(run=_run_checkpoint_merge)
    summary = "write weights and optimizer state in the layout of torch.distributed.checkpoint, for dcp.load"
    export = actions.add_parser("export", help=summary, description=_sentence(summary))
    export.add_argument("path", type=_path, metavar="PATH", help=path)
    export.add_argument("-o", "--output", type=_path, metavar="DIR", required=True, help="a new folder")
    export.add_argument(
        "--object",
        action="append",
        type=_prefixed,
        metavar="NAME[=PREFIX]",
        help="an object, and what its keys begin with (default: all objects with tensors, by their names)",
    )
    export.add_argument("--flatten-optimizer", action="store_true", help="options by parameter, as torchtitan has them")
    export.set_defaults(run=_run_checkpoint_export)
    summary = "write what dcp.save of torch.distributed.checkpoint has written as a checkpoint to resume from"
    importing = actions.add_parser("import", help=summary, description=_sentence(summary))
    importing.add_argument("path", type=_path, metavar="DIR", help="the folder that dcp.save was given")
    importing.add_argument(
        "-o", "--output", type=_path, metavar="FOLDER", required=True, help="folder of checkpoints; step-N is added"
    )
    importing.add_argument("--step", type=int, default=0, metavar="N", help="steps made so far (default: %(default)s)")
    importing.add_argument(
        "--object",
        action="append",
        type=_prefixed,
        metavar="NAME[=PREFIX]",
        help="an object, and what its keys begin with (default: model and optimizer)",
    )
    importing.set_defaults(run=_run_checkpoint_import)


def _add_conform(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "test a backend, such as a plug-in: run the tests that every backend must pass (needs pytest)"
    parser = commands.add_parser("conform", help=summary, description=_sentence(summary))
    parser.add_argument("--backend", metavar="NAME", required=True, help="name of the backend")
    parser.add_argument(
        "--processes", metavar="N", default="1,2,3", help="numbers of processes, comma-separated (default: %(default)s)"
    )
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments for pytest, after --")
    parser.set_defaults(run=_run_conform)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "show what this machine has for distributed training, and the command that adds what is missing"
    parser = commands.add_parser("doctor", help=summary, description=_sentence(summary))
    parser.add_argument(
        "--hosts",
        "-H",
        metavar="LIST",
        help="hosts of a job to look at over ssh: node1,node2 (or node1:8,node2:8); exit code 1 if one can't take part",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=_run_doctor)


def _add_install_horovod(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "build Horovod against the installed torch, install it, and test it on two processes"
    parser = commands.add_parser("install-horovod", help=summary, description=_sentence(summary))
    parser.add_argument("--version", default="0.28.1", help="version of Horovod (default: %(default)s)")
    parser.add_argument(
        "--gpu",
        choices=["auto", "nccl", "none"],
        default="auto",
        help="nccl also builds GPU operations; auto does so if torch finds a GPU (default: %(default)s)",
    )
    parser.add_argument("--without-mpi", action="store_true", help="build without MPI even if it is installed")
    parser.add_argument("--force", action="store_true", help="build, install and test again even if it is installed")
    parser.set_defaults(run=_run_install_horovod)


def _add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "start a script with a launcher, on this host or on several, or print the command that does"
    parser = commands.add_parser(
        "launch",
        help=summary,
        description=_sentence(summary),
        usage="unitrain launch [OPTION ...] TARGET [-- FLAG ...]",
    )
    parser.add_argument(
        "--launcher",
        choices=["torchrun", "mpirun", "horovodrun", "srun"],
        default="torchrun",
        metavar="NAME",
        help="torchrun, mpirun, horovodrun or srun (default: %(default)s)",
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--hosts", metavar="LIST", help="hosts and their numbers of processes: node1:8,node2:8")
    place.add_argument(
        "--processes", type=int, default=2, metavar="N", help="number of processes on this host (default: %(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command, and start nothing")
    parser.add_argument("target", type=_path, metavar="TARGET", help="path of the script, the same on every host")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAG", help="flags for the script")
    parser.set_defaults(run=_run_launch)


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = (
        "run a command, forward signals to its ranks so that they stop with a checkpoint, and restart it on failure"
    )
    parser = commands.add_parser(
        "run", help=summary, description=_sentence(summary), usage="unitrain run [-h] [--max-restarts N] -- COMMAND ..."
    )
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="maximum number of restarts (default: %(default)s)"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="mpirun, torchrun, python, ...")
    parser.set_defaults(run=_run_run)


def _add_template(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "write a job file for a script: for SLURM, Kubernetes, Ray or Docker Compose"
    parser = commands.add_parser(
        "template",
        help=summary,
        description=_sentence(summary),
        usage="unitrain template [OPTION ...] KIND TARGET [-- FLAG ...]",
    )
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
    parser.add_argument("--output", "-o", type=_path, metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument(
        "kind", choices=["compose", "mpijob", "pytorchjob", "ray", "slurm"], metavar="KIND", help="%(choices)s"
    )
    parser.add_argument(
        "target", type=_path, metavar="TARGET", help="path of the script, from the folder in which the job starts"
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAG", help="flags for the script")
    parser.set_defaults(run=_run_template)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "train with every launcher and backend found here, and compare each with a plain loop on one device"
    parser = commands.add_parser("verify", help=summary, description=_sentence(summary))
    parser.add_argument("--backend", metavar="NAME", help="the only backend to verify (default: all)")
    parser.add_argument(
        "--device", default="cpu", help="device to train on: cpu, cuda or cuda:N (default: %(default)s)"
    )
    parser.add_argument("--recipe", type=_path, metavar="PATH", help="recipe to train instead of the built-in model")
    parser.add_argument("--output", type=_path, metavar="FILE", help="write the deviations to this file as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags for the recipe, after --")
    parser.set_defaults(run=_run_verify)


def _after_dashes(remainder: list[str]) -> list[str]:
    """Return the remainder without a leading "--", which only some versions of Python remove."""
    return remainder[1:] if remainder[:1] == ["--"] else remainder


# The module of a subcommand is imported when it is run, so that --help and other subcommands start faster.


def _run_bench(arguments: argparse.Namespace) -> int:
    from unitrain.commands.bench.candidates import LEVERS
    from unitrain.commands.bench.command import bench

    levers = tuple(LEVERS) if arguments.levers is None else tuple(arguments.levers.split(","))
    return bench(
        arguments.target,
        flags=_after_dashes(arguments.flags),
        backend=arguments.backend,
        processes=arguments.processes,
        levers=() if levers == ("none",) else levers,
        steps=arguments.steps,
        output=arguments.output,
        picture=not arguments.no_picture,
    )


def _run_checkpoint_inspect(arguments: argparse.Namespace) -> int:
    from unitrain.commands.checkpoint import inspect

    for line in inspect(arguments.path):
        print(line)
    return 0


def _run_checkpoint_merge(arguments: argparse.Namespace) -> int:
    from unitrain.commands.checkpoint import merge

    merge(arguments.path, arguments.output, arguments.object)
    print(f"written: {arguments.output}")
    return 0


def _run_checkpoint_export(arguments: argparse.Namespace) -> int:
    from unitrain.commands.dcp import export

    prefixes = dict(arguments.object or ())
    for line in export(arguments.path, arguments.output, prefixes, flatten_optimizer=arguments.flatten_optimizer):
        print(line)
    return 0


def _run_checkpoint_import(arguments: argparse.Namespace) -> int:
    from unitrain.commands.dcp import import_

    for line in import_(arguments.path, arguments.output, dict(arguments.object or ()), arguments.step):
        print(line)
    return 0


def _run_conform(arguments: argparse.Namespace) -> int:
    from unitrain.commands.conform import conform

    return conform(arguments.backend, processes=arguments.processes, arguments=arguments.arguments)


def _run_doctor(arguments: argparse.Namespace) -> int:
    from unitrain.commands.doctor.command import doctor

    return doctor(arguments.hosts, as_json=arguments.json)


def _run_install_horovod(arguments: argparse.Namespace) -> int:
    from unitrain.commands.horovod.install import install_horovod

    gpu = None if arguments.gpu == "none" else arguments.gpu
    install_horovod(arguments.version, gpu=gpu, without_mpi=arguments.without_mpi, force=arguments.force)
    return 0


def _run_launch(arguments: argparse.Namespace) -> int:
    from unitrain.commands.launch import launch

    return launch(
        arguments.launcher,
        arguments.hosts,
        arguments.processes,
        [str(arguments.target), *_after_dashes(arguments.flags)],
        dry_run=arguments.dry_run,
    )


def _run_run(arguments: argparse.Namespace) -> int:
    from unitrain.job.starting.supervisor import run

    return run(_after_dashes(arguments.program), max_restarts=arguments.max_restarts)


def _run_template(arguments: argparse.Namespace) -> int:
    from unitrain.commands.template import Job, default_name, template, write

    job = Job(
        arguments.target,
        _after_dashes(arguments.flags),
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


def _run_verify(arguments: argparse.Namespace) -> int:
    from unitrain.commands.verify.command import verify

    return verify(
        backend=arguments.backend,
        device=arguments.device,
        script=arguments.recipe,
        flags=arguments.flags,
        output=arguments.output,
    )


if __name__ == "__main__":
    sys.exit(main())
