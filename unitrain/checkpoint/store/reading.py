"""Opens files, and says why one can't be read."""

from __future__ import annotations

import errno
import os
import pickle
import re
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A pipe would be waited for, and a device may be read for ever: both are refused.

    Raises:
        OSError: it can't be opened, or is a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def reason(error: Exception) -> str:
    """Return why a file could not be written or read, without torch's advice to allow code in it."""
    if isinstance(error, pickle.UnpicklingError):
        kind = re.search(r"GLOBAL (\S+)", str(error))
        found = f"{kind[1]} is" if kind else "it contains an object that is"
        return f"{found} neither a tensor nor plain data (int, float, str, list, dict), and pickled code is never run."
    return f"{type(error).__name__}: {error}"
