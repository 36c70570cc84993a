"""``unitrain horovod``: runs a script that imports ``horovod.torch``, on UniTrain's backends instead."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from unitrain.commands.arguments import AfterDashes
from unitrain.errors import UsageError


def run_script(command: Sequence[str], **settings: str | None) -> NoReturn:
    """Run a script in the place of this process, with ``unitrain.compat.horovod`` in the place of ``horovod``.

    A folder with that name comes first on the path, so that it holds for child processes, too.

    Args:
        command: the script and its arguments, or -m, a module and its arguments.
        **settings: environment variables to set; those that are None stay as they are.

    Raises:
        UsageError: no script is given, or the compatible module is not there.
    """
    spec = find_spec("unitrain.compat.horovod") if find_spec("unitrain.compat") else None
    if not command or spec is None or spec.origin is None:
        missing = "unitrain.compat.horovod is not installed" if command else "no script is given"
        raise UsageError(f"{missing}: the command is `unitrain horovod SCRIPT [ARGUMENT ...]`, in UniTrain's wheel.")
    os.environ |= {name: value for name, value in settings.items() if value is not None}
    path = [str(Path(spec.origin).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.execv(sys.executable, [sys.executable, *command])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = "unitrain horovod [-h] [--strategy.SETTING VALUE ...] SCRIPT [ARGUMENT ...]"
    parser.epilog = (
        "Example: torchrun --nproc-per-node 4 --no-python unitrain horovod train.py --epochs 3. All settings of a "
        "strategy can be set by environment variables, as UNITRAIN_DDP__COMMUNICATION is."
    )
    for name, meaning in (
        ("backend", "ddp (the default with several processes), horovod, ..."),
        ("device", "cpu, ..."),
    ):
        variable = f"UNITRAIN_{name.upper()}"
        parser.add_argument(f"--strategy.{name}", dest=variable, metavar="NAME", help=f"sets {variable}: {meaning}")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, action=AfterDashes, metavar="SCRIPT", help="the script and its arguments"
    )
    parser.set_defaults(run=run_script)
