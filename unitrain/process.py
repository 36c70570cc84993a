"""Services of the operating system: printing, ending processes, glibc's memory settings."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn, TextIO

import psutil

_ABORT_S = 1.0
# How long a message waits for the reader of a full pipe, or a stopped terminal, before it is dropped.
_WRITE_S = 2.0
_FLUSH_S = 2.0
# Parameters of Linux's prctl: the signal that this process gets when its parent dies, and the name of a thread.
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None)
# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST_FROM_HEAP = 32 * 2**20  # the largest value that glibc accepts


def cache_folder() -> Path:
    """Return UniTrain's cache folder: UNITRAIN_CACHE, else ``unitrain`` in the user's cache folder."""
    if chosen := os.environ.get("UNITRAIN_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "unitrain"


def print_stdout(message: str) -> None:
    """Print on stdout, after the script's own output. Like ``print_stderr``, never raises an error."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    _print(sys.stdout, message)


def print_stderr(message: str) -> None:
    """Print on stderr, with a single write if the message is short: other ranks' output is not interleaved with it.

    A message that can't be written (stderr is closed or full, or its reader has gone or has stopped) is dropped: what
    the library prints must not end a job, nor keep it from ending.
    """
    _print(sys.stderr, message)


def _print(stream: TextIO | None, message: str) -> None:
    """Write a line to a stream's descriptor. Blocks for up to 2 s while nobody reads it."""
    if stream is None:  # Python found the descriptor closed
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a notebook's stream, say
        with suppress(Exception):  # whatever another library's object raises
            stream.write(f"{message}\n")
            stream.flush()
        return
    # Not through the stream: a thread that is blocked in it holds its lock, and what can't be written would stay in its
    # buffer, and change the exit code when Python flushes it at the end.
    left = f"{message}\n".encode(stream.encoding or "utf-8", errors="backslashreplace")
    writable = select.poll()
    writable.register(descriptor, select.POLLOUT)
    with suppress(OSError):
        while left and writable.poll(_WRITE_S * 1000):
            left = left[os.write(descriptor, left[: select.PIPE_BUF]) :]  # so much fits where poll says writable


def occupy_standard_descriptors() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr.

    Otherwise the next file or socket would get its number, and in it what C libraries print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def exit_now(code: int, line: str = "") -> NoReturn:
    """End this process from any thread, without exit handlers, which may wait for ranks that are gone.

    Args:
        code: the exit code.
        line: a last line for stderr; an empty string for none.
    """
    if line:
        print_stderr(line)
    flush()
    os._exit(code)


def flush() -> None:
    """Flush stdout and stderr, if that is possible within seconds."""
    flushing = threading.Thread(target=_flush, daemon=True)
    with suppress(RuntimeError):  # Python is shutting down, and starts no thread
        flushing.start()
        flushing.join(_FLUSH_S)  # longer if the reader of stdout has stopped


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process receive a signal when its parent dies. Safe in a ``preexec_fn``. Linux only.

    Args:
        number: the signal. SIGKILL can't be ignored.
    """
    _call("prctl", _PR_SET_PDEATHSIG, number)


def name_thread(name: str) -> None:
    """Give the calling thread a name that other processes see, of 15 characters at most. Linux only.

    Python 3.14 gives threads their names in Python, and earlier releases none.
    """
    _call("prctl", _PR_SET_NAME, name.encode())


def has_thread(pid: int, name: str) -> bool:
    """Return whether a process has a thread that has called ``name_thread``."""
    with suppress(OSError):  # it has ended, or one of its threads has
        return any(file.read_text().strip() == name for file in Path(f"/proc/{pid}/task").glob("*/comm"))
    return False


def print_stacks(title: str) -> None:
    """Print the stacks of all threads on stderr, the main thread's last."""
    # Through a file: written to a full pipe, they would block this process with the GIL held.
    with os.fdopen(os.memfd_create("stacks"), "w+b") if hasattr(os, "memfd_create") else TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        print_stderr(f"{title}\n{file.read().decode(errors='replace').rstrip()}")


def print_stacks_when_killed() -> None:
    """Print the stacks of all threads when the process crashes or is aborted. Works without the GIL."""
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, AttributeError, RuntimeError):  # stderr is closed, or has no descriptor
            faulthandler.enable()


def is_busy() -> bool:
    """Return whether a thread of this process, except the calling one, runs, or waits for a processor or a disk.

    True where the system does not tell.
    """
    this_thread = str(threading.get_native_id())
    try:
        tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != this_thread]
        return any((task / "stat").read_text().rpartition(")")[2].split()[0] in "RD" for task in tasks)
    except (OSError, IndexError):  # also: a thread has ended meanwhile
        return True


def resident_memory() -> int:
    """Return how many bytes of host memory this process has; 0 if the system does not tell, for want of files, say."""
    with suppress(psutil.Error, OSError):
        return int(psutil.Process().memory_info().rss)
    return 0


def start_time(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot: a pid may be reused, and clocks may be set.

    Other systems than Linux tell the time of day, here in milliseconds.

    Raises:
        OSError: there is no such process.
    """
    if not _LINUX:
        try:
            return int(psutil.Process(pid).create_time() * 1000)
        except psutil.Error as error:
            raise ProcessLookupError(str(error)) from error
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    return int(after_name.split()[19])  # "starttime" in proc(5)


def boot_id() -> str:
    """Return an identifier of this host, by whatever names its containers have, since it was started."""
    if _LINUX:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def usable_cores() -> int:
    """Return the number of cores that this process may use: those that it is bound to, where a system has that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kill_stalled(pid: int, started: int, *, aborts: bool) -> None:
    """Kill a stalled process of this host.

    One that was stopped (SIGSTOP) is killed directly. One that is running, but holds the GIL, is aborted first: it then
    prints its stacks. Blocks for up to a second.

    Args:
        pid: the process's id.
        started: its ``start_time``. A process with another is left alone.
        aborts: whether this caller aborts it: one of several callers does.
    """
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        if start_time(pid) != started:
            return
        if process.status() != psutil.STATUS_STOPPED:
            if aborts:
                process.send_signal(signal.SIGABRT)
            with suppress(psutil.TimeoutExpired):
                process.wait(_ABORT_S)
                return
        process.kill()


def retain_freed_memory() -> None:
    """Have glibc keep freed memory for the next step, except blocks of more than 32 MiB.

    It would return the top of its heap to the system when gradients are freed at the end of a step. The next step then
    had to fault in thousands of pages, which took a fifth of a small ResNet's time.
    """
    _call("mallopt", _M_TRIM_THRESHOLD, _NEVER)
    _call("mallopt", _M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)


def return_freed_memory(smallest: int = 64 * 2**10) -> None:
    """Have glibc return freed blocks of so many bytes or more to the system at once, from now on.

    Until glibc 2.38, no block of torch's fits into the gap that one of the same size has left (its bug 14581): where
    large blocks of a few sizes come and go among others that stay, the heap grows to several times of what is in use.

    Args:
        smallest: size in bytes of the smallest such block.
    """
    _call("mallopt", _M_MMAP_THRESHOLD, smallest)


def trim_heap() -> None:
    """Have glibc return the memory that it keeps to the system."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int | bytes) -> None:
    """Call a function that other systems or C libraries lack, if it is there."""
    getattr(_libc, name, lambda *_: None)(*arguments)
