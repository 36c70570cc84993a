"""The ``unitrain`` command: reads the command line and hands over to the module of one subcommand."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from unitrain.errors import UnitrainError

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return the exit status."""
    arguments = _parser().parse_args(argv)
    # As an exception, a SIGTERM ends what a subcommand has started too; by itself it would leave a compiler running.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(arguments.run(arguments))
    except UnitrainError as error:
        print(f"unitrain {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"unitrain {arguments.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unitrain", description="One PyTorch training script, under every launcher.")
    parser.add_argument("--version", action="version", version=f"unitrain {version('unitrain')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_doctor(commands)
    _add_install_horovod(commands)
    _add_verify(commands)
    return parser


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "show what this machine has for distributed training, and the command that adds what is missing"
    parser = commands.add_parser("doctor", help=summary, description=_sentence(summary))
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    parser.set_defaults(run=_run_doctor)


def _add_install_horovod(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "build Horovod against the installed torch, install it, and prove it on two processes"
    parser = commands.add_parser("install-horovod", help=summary, description=_sentence(summary))
    parser.add_argument("--version", default="0.28.1", help="release of Horovod (default: %(default)s)")
    parser.add_argument("--gpu", choices=["nccl"], help="also build GPU operations, on NCCL (default: CPU only)")
    parser.add_argument("--without-mpi", action="store_true", help="leave MPI out even where it is installed")
    parser.add_argument("--force", action="store_true", help="build, install and prove again, whatever is there")
    parser.set_defaults(run=_run_install_horovod)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "train under every launcher and backend found here, and compare each with a plain loop on one device"
    parser = commands.add_parser("verify", help=summary, description=_sentence(summary))
    parser.add_argument("--backend", metavar="NAME", help="the only backend to put on trial (default: all)")
    parser.add_argument("--recipe", type=Path, metavar="PATH", help="a recipe to train instead of the built-in model")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the deviations as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="after --, flags for the recipe")
    parser.set_defaults(run=_run_verify)


# A subcommand's module is imported when it is run, so that --help and the other subcommands don't pay for it.


def _run_doctor(arguments: argparse.Namespace) -> int:
    from unitrain.machine.doctor import doctor

    doctor(as_json=arguments.json)
    return 0


def _run_install_horovod(arguments: argparse.Namespace) -> int:
    from unitrain.machine.install_horovod import install_horovod

    install_horovod(arguments.version, gpu=arguments.gpu, without_mpi=arguments.without_mpi, force=arguments.force)
    return 0


def _run_verify(arguments: argparse.Namespace) -> int:
    from unitrain.verify.command import verify

    return verify(backend=arguments.backend, script=arguments.recipe, flags=arguments.flags, output=arguments.output)


if __name__ == "__main__":
    sys.exit(main())
