"""Operating system services: printing to stderr, ending processes, glibc's memory settings."""

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
_LARGEST_FROM_HEAP = 32 * 2**20  # the largest value that glibc accepts


def print_stderr(message: str) -> None:
    """Print on stderr with a single write, so that the output of other ranks is not interleaved with it.

    ``print`` writes the message and the newline separately if Python is unbuffered, as under torchrun.
    """
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def exit_now(code: int, line: str = "") -> NoReturn:
    """End this process from any thread, without exit handlers, which may wait for ranks that are gone."""
    with suppress(OSError, ValueError):
        if line:
            print_stderr(line)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process receive a signal when its parent dies. Safe in a ``preexec_fn``."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def print_stacks(title: str) -> None:
    """Print the stacks of all threads on stderr, the main thread's last."""
    with suppress(OSError, ValueError, AttributeError):  # stderr may have no file descriptor, in a notebook say
        print_stderr(title)
        faulthandler.dump_traceback(all_threads=True)


def print_stacks_when_killed() -> None:
    """Print the stacks of all threads when the process crashes or is aborted. Works without the GIL."""
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, AttributeError):
            faulthandler.enable()


def kill_stalled(pid: int, created: float, *, aborts: bool) -> None:
    """Kill a stalled process of this host.

    One that was stopped (SIGSTOP) is killed directly. One that is running, but holds the GIL, is aborted first: it
    then prints its stacks.

    Args:
        pid: its process id.
        created: when it was started. Another process that has since got the same id is left alone.
        aborts: whether this caller, of several, is the one that aborts it.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - created) > 1.0:
            return
        if process.status() != psutil.STATUS_STOPPED:
            if aborts:
                process.send_signal(signal.SIGABRT)
            with suppress(psutil.TimeoutExpired):
                process.wait(_ABORT_S)
                return
        process.kill()


def keep_memory() -> None:
    """Have glibc keep freed memory for the next step.

    Gradients are freed at the end of a step, when activations are gone too, and glibc would return the top of its heap
    to the system. The next step then had to fault in thousands of pages, which took a fifth of a small ResNet's time.
    Blocks of more than 32 MiB are still returned. Does nothing with other C libraries.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
