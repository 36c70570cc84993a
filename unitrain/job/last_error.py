"""The last error that ended a job of this user on this host, for ``unitrain doctor --report``."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from unitrain.process import cache_folder


def keep(text: str) -> None:
    """Keep the text of an error in place of the one before, in the cache folder. Never raises an error."""
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8", errors="replace")


def kept() -> str:
    """Return the error that was kept last, and how long ago; "" without one."""
    path = _path()
    if not path.exists():
        return ""
    return f"{path.read_text(encoding='utf-8')}, {(time.time() - path.stat().st_mtime) / 60:.0f} min ago"


def _path() -> Path:
    return cache_folder() / "last-error.txt"
