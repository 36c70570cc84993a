"""The ``unitrain`` command: parses the command line with the parser of a subcommand, and calls its function.

``add_arguments`` of its module adds arguments to the parser, named like the parameters of what it sets as ``run``.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from unitrain.commands.arguments import sentence
from unitrain.errors import UnitrainError
from unitrain.process import occupy_standard_descriptors, print_stderr

_INTERRUPTED = 130
_COMMANDS = {
    "checkpoint": "show what is in a checkpoint, or write the whole weights in it to one file",
    "conform": "test a backend, such as a plug-in: run the tests that every backend must pass (needs pytest)",
    "doctor": "show what this machine has for distributed training, and the command that adds what is missing",
    "horovod": "run a script written for Horovod on UniTrain's backends, started by any launcher",
    "install-horovod": "build Horovod against the installed torch, install it, and test it on two processes",
    "run": "run a command, forward signals to its ranks so that they stop with a checkpoint, and restart it on failure",
    "verify": "train with every launcher and backend found here, and compare each with a plain loop on one device",
}
"""What each command of the core does. Features add others, in modules ``command``."""
_MODULES = {
    "doctor": "doctor.command",
    "horovod": "horovod.script",
    "install-horovod": "horovod.install",
}
"""Where a command's module in ``unitrain.commands`` does not have its name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv``) and return the exit code.

    Errors of UniTrain become a line on stderr and their own exit code, Ctrl-C 130, and a reader that has gone 141.
    """
    # Before any file is opened, which could otherwise become stdout.
    occupy_standard_descriptors()
    argv = sys.argv[1:] if argv is None else argv
    arguments = vars(_parser(argv).parse_args(argv))
    command, run = arguments.pop("subcommand"), arguments.pop("run")
    # Raised as an exception, SIGTERM also ends the child processes of a subcommand, for example a compiler.
    previous_handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        code = int(run(**arguments))
        # An error of the output must be met here, and not when Python exits.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UnitrainError as error:
        print_stderr(f"unitrain {command}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        print_stderr(f"unitrain {command}: interrupted")
        return _INTERRUPTED
    except OSError as error:
        # A bug shows its traceback. A full disk or a closed pipe is no bug.
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left at exit
        if error.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE  # the reader has what it wanted: | head
        print_stderr(f"unitrain {command}: its output can't be written: {error.strerror}")
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands. Only the command that is called adds its arguments."""
    parser = argparse.ArgumentParser(prog="unitrain", description="One PyTorch training script, under every launcher.")
    parser.add_argument("--version", action="version", version=f"unitrain {version('unitrain')}")
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for name, (summary, module) in sorted(_commands(argv).items()):
        command = commands.add_parser(name, help=summary, description=sentence(summary))
        if argv[:1] == [name]:  # the others are not imported, so that --help starts faster
            import_module(module).add_arguments(command)
    return parser


def _commands(argv: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the summary and the module of each command; without the features' if ``argv`` calls one of the core.

    Args:
        argv: the arguments of the command line.
    """
    commands = {name: (summary, f"unitrain.commands.{_MODULES.get(name, name)}") for name, summary in _COMMANDS.items()}
    if not commands.keys() & set(argv[:1]):
        from unitrain import features  # imports pydantic, which few commands need

        commands |= {module.NAME: (module.SUMMARY, module.__name__) for module in features.commands()}
    return commands


if __name__ == "__main__":
    sys.exit(main())
