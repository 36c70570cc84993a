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


def run_script(command: Sequence[str], **settings: str | None) -> NoReturn:
    """Run a script in the place of this process, with ``unitrain.compat.horovod`` in the place of ``horovod``.

    A folder with that name comes first on the path, so that it holds for child processes, too.

    Args:
        command: the script and its arguments, or -m, a module and its arguments.
        **settings: environment variables to set, unless they are None.

    Raises:
        UsageError: no script is given, or the compatible module is not there.
    """
    folder = Path(__file__).parents[2] / "compat"
    if not command or not (folder / "horovod").is_dir():
        missing = f"{folder / 'horovod'} is missing: reinstall unitrain" if command else "no script is given: name it"
        raise UsageError(f"{missing}. The command is `unitrain horovod SCRIPT [ARGUMENT ...]`.")
    os.environ.update({name: value for name, value in settings.items() if value is not None})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execv(sys.executable, [sys.executable, *command])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = "unitrain horovod [-h] [--strategy.backend NAME] [--strategy.device NAME] SCRIPT [ARGUMENT ...]"
    parser.epilog = "Example: torchrun --nproc-per-node 4 --no-python unitrain horovod train.py --epochs 3"
    for name, example in (("backend", "horovod, or ddp, the default with several processes"), ("device", "cpu, cuda")):
        variable = f"UNITRAIN_{name.upper()}"
        parser.add_argument(f"--strategy.{name}", dest=variable, metavar="NAME", help=f"set {variable}: {example}")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, action=AfterDashes, metavar="SCRIPT", help="and its arguments"
    )
    parser.set_defaults(run=run_script)
