"""Pieces that the parsers of several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from unitrain.url import is_url


def sentence(summary: str) -> str:
    """Return the summary of a command as the sentence that describes it."""
    return f"{summary[0].upper()}{summary[1:]}."


def path(text: str) -> Path:
    """Return a path of a file that commands start or write: the type of an argument.

    Raises:
        argparse.ArgumentTypeError: it is a URL, such as s3://bucket/run.
    """
    # As a path, s3://bucket would be a folder "s3:" in the current one.
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL: pass the path of a file or folder of this machine")
    return Path(text)


class AfterDashes(argparse.Action):
    """Stores the remaining arguments without a leading "--", which only some versions of Python remove."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        """Store the values of the argument in the namespace."""
        setattr(namespace, self.dest, values[1:] if values[:1] == ["--"] else values)
