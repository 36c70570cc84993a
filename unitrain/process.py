"""This process: how it ends, what it prints on the way, and how its memory is given back to the system."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

import psutil

_ABORT_S = 1.0
_PR_SET_PDEATHSIG = 1  # Linux: the signal that this process gets when its parent dies
_libc = ctypes.CDLL(None)
# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST_FROM_HEAP = 32 * 2**20  # as large as glibc lets it be


def tell(text: str) -> None:
    """Print on stderr in one piece, whose lines those of other ranks don't come between.

    ``print`` writes a text and its end by themselves where Python is unbuffered, as torchrun starts it.
    """
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def leave(code: int, line: str = "") -> NoReturn:
    """End this process at once, from any thread: without exit handlers, which may wait for ranks that are gone."""
    with suppress(OSError, ValueError):
        if line:
            tell(line)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let this process get a signal when its parent dies, however that dies. Fit for a ``preexec_fn``."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def print_stacks(title: str) -> None:
    """Print where this process's threads are, on stderr, the main thread last."""
    with suppress(OSError, ValueError, AttributeError):  # a stderr without a file, in a notebook say
        tell(title)
        faulthandler.dump_traceback(all_threads=True)


def print_stacks_when_killed() -> None:
    """Print where the threads are when the process crashes, or is aborted by ``end_frozen``. Works without the GIL."""
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, AttributeError):
            faulthandler.enable()


def end_frozen(pid: int, created: float, *, asks: bool) -> None:
    """Kill a process of this host that gives no sign of life.

    One that was stopped (SIGSTOP) is killed as it is. One that runs, but lets no other thread of its own run, is
    aborted first, for it then prints where it is.

    Args:
        pid: its number.
        created: when it was started; another process that has its number by now is left alone.
        asks: whether this caller, of several, is the one that aborts it.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - created) > 1.0:
            return
        if process.status() != psutil.STATUS_STOPPED:
            if asks:
                process.send_signal(signal.SIGABRT)
            with suppress(psutil.TimeoutExpired):
                process.wait(_ABORT_S)
                return
        process.kill()


def keep_memory() -> None:
    """Let glibc keep what is freed, so that the next step finds it there.

    Gradients are dropped at the end of a step, when activations are gone too, and glibc then gives the top of its heap
    back to the system: the next step had to fault in thousands of pages, which took a fifth of a small ResNet's time.
    Blocks of more than 32 MiB still go back. Elsewhere than under glibc this does nothing.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
