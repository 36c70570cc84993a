"""Goes on in another world under horovodrun's elastic driver, which starts no process again that has not failed.

After the failure of a rank, and when hosts have been added or removed, the driver waits until every process has asked
for its next rank or has ended. It takes each that ends with an error for a failure of its host, which it then leaves
out. So survivors must not end: in place of each, its command is run again, by ``asking.py``, and
resumes from the checkpoint that was saved before. No state has to be taken back, as in Horovod's own elastic mode.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from unitrain.features.horovod_elastic import asking
from unitrain.process import flush, print_stderr

_END_S = 1.0
_started_in = os.getcwd()


def start_again(line: str = "") -> NoReturn:
    """Run this process's command again in its place, as soon as it has a new rank. From any thread."""
    if line:
        print_stderr(line)
    flush()
    for worker in multiprocessing.active_children():  # a loader's would not notice: their parent stays
        worker.kill()
        worker.join(_END_S)
    # What C++ libraries have opened would stay open, and other ranks would wait at it.
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2:
            with suppress(OSError):  # the descriptor of the listing
                os.set_inheritable(descriptor, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    environ: Mapping[bytes, bytes] = os.environb
    with suppress(OSError):  # on Linux, without what the script has changed
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
        environ = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
    with suppress(OSError):
        os.chdir(_started_in)
    # Isolated and without site-packages: it starts in milliseconds, and imports nothing from the script's folder.
    os.execve(sys.executable, [sys.executable, "-I", "-S", asking.__file__, *sys.orig_argv], environ)
