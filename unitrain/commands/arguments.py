"""What the parsers of several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from unitrain.url import is_url


def sentence(summary: str) -> str:
    """Return the summary of a command as the sentence that describes it."""
    return f"{summary[0].upper()}{summary[1:]}."


def path(text: str) -> Path:
    """Return a path of a file that commands start or write."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL: pass the path of a file or folder of this machine")
    return Path(text)


def after_dashes(remainder: list[str]) -> list[str]:
    """Return the remainder without a leading "--", which only some versions of Python remove."""
    return remainder[1:] if remainder[:1] == ["--"] else remainder
