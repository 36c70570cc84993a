"""``unitrain run``: the command line of the supervisor."""

from __future__ import annotations

import argparse

from unitrain.commands.arguments import AfterDashes
from unitrain.job.starting.supervisor import run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = "unitrain run [-h] [--max-restarts N] -- COMMAND ..."
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="maximum number of restarts (default: %(default)s)"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, action=AfterDashes, metavar="COMMAND", help="mpirun, torchrun, python, ..."
    )
    parser.set_defaults(run=run)
