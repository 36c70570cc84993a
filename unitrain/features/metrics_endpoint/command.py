"""The command ``unitrain top``. What it shows is imported when it runs."""

from __future__ import annotations

import argparse

NAME = "top"
SUMMARY = "show what the ranks of a running job do, in the terminal (needs its setting metrics.port)"


def top(target: str, once: bool = False) -> int:
    """Show a job until it ends; or ``once``, as if stdout is no terminal."""
    from unitrain.features.metrics_endpoint.view import show

    return show(target, once)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("target", metavar="FOLDER|HOST:PORT", help="folder of a run on this host, or rank 0's address")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.set_defaults(run=top)
