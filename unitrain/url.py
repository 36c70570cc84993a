"""Tells paths of this machine's file systems from URLs of others."""

from __future__ import annotations

import re
from pathlib import Path

from unitrain.errors import UsageError

# A scheme of two letters at least, since a single one is a drive of Windows; fsspec chains URLs by "::".
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(::.*)?:/(/?)")
_OF_THIS_MACHINE = ("file", "local")


def is_url(path: str | Path) -> bool:
    """Return whether a path is a URL, perhaps one that has lost a slash since ``Path`` takes it for a relative path."""
    return _URL.match(str(path)) is not None


def parsed(path: str | Path) -> Path | str:
    """Return a path of this machine's file systems as a ``Path``, and a URL as a str.

    A URL with scheme ``file`` or ``local`` is a path. Nothing is opened: that a URL's store exists is not checked.

    Raises:
        UsageError: the URL is a chain of several (``simplecache::s3://...``), or has lost a slash in a ``Path``.
    """
    match = _URL.match(str(path))
    if match is None:
        return Path(path)
    if match[1].lower() in _OF_THIS_MACHINE:
        return Path("/", str(path)[match.end() :])
    if match[2]:
        raise UsageError(f"{path} is a chain of URLs: pass the URL of the store itself.")
    if not match[3]:
        raise UsageError(f"{path} is a URL that has lost a slash, as pathlib's Path removes one: pass it as a str.")
    return str(path)
