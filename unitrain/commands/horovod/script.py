"""``unitrain horovod``: runs a script that imports ``horovod.torch``, on UniTrain's backends instead."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from unitrain.commands.arguments import AfterDashes
from unitrain.errors import UsageError


def run_script(command: Sequence[str]) -> NoReturn:
    """Run a script in the place of this process, with ``unitrain.compat.horovod`` in the place of ``horovod``.

    A folder with that name comes first on the path, so that it holds for child processes, too.

    Args:
        command: the script and its arguments, or -m, a module and its arguments.

    Raises:
        UsageError: no script is given.
    """
    folder = Path(__file__).parents[2] / "compat"
    if not command:
        raise UsageError("no script is given. The command is `unitrain horovod SCRIPT [ARGUMENT ...]`.")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execv(sys.executable, [sys.executable, *command])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = "unitrain horovod [-h] SCRIPT [ARGUMENT ...]"
    parser.epilog = "Example: torchrun --nproc-per-node 4 --no-python unitrain horovod train.py --epochs 3"
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, action=AfterDashes, metavar="SCRIPT", help="and its arguments"
    )
    parser.set_defaults(run=run_script)
