"""The command ``unitrain top``."""

from __future__ import annotations

import argparse

NAME = "top"
SUMMARY = "show what the ranks of a running job do, in the terminal (needs its setting metrics.port)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    # Not at the top: ``unitrain --help`` imports this module for its summary only.
    from unitrain.features.metrics_endpoint.view import show

    parser.add_argument("target", metavar="FOLDER|HOST:PORT", help="folder of a run on this host, or rank 0's address")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.set_defaults(run=show)
