"""``unitrain run``: runs a command, forwards signals to its ranks, restarts it on failure, and cleans up after it.

Signals go directly to the ranks, not to their launcher. mpirun would kill the ranks 1 s after it gets a SIGTERM,
horovodrun after 5 s and torchrun after 30 s, which may be too short for a checkpoint. A SIGUSR1 kills torchrun and
horovodrun.

What the command leaves behind is adopted, and killed.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from unitrain.errors import ConfigError, LaunchError
from unitrain.process import end_with_parent, print_stderr

_PR_SET_CHILD_SUBREAPER = 36

# Success, a wrong setting, NaN or infinity, stopped by SIGINT, SIGUSR1 or SIGTERM: a restart would end the same way.
_FINAL_CODES = frozenset({0, 2, 3, 130, 138, 143})
_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP})
# A process with one of these is a rank, unless the same value is in this process's environment.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK")

_LONGEST_PAUSE_S = 30.0
# Time for a launcher to notice that its ranks have ended; mpirun takes 2 s if they did not end at the same moment.
_LEAVE_S = 5.0
_CHECK_S = 1.0


def run(command: Sequence[str], *, max_restarts: int = 0) -> int:
    """Run a command and return its exit code, or 128 plus the number of the signal that killed it.

    After an unexpected failure the command is restarted, at most ``max_restarts`` times. The first SIGTERM, SIGINT or
    SIGUSR1 is forwarded, a SIGHUP as a SIGTERM, and the command is not restarted after it; a second SIGTERM or SIGINT
    kills the command. Everything that the command has started is killed when it ends, and nothing else.

    Args:
        command: the program and its arguments.
        max_restarts: how often the command is started again at most.

    Raises:
        ConfigError: ``max_restarts`` is negative.
        LaunchError: the system is not Linux, there is no command, or it can't be started.
    """
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts is {max_restarts}, but must be an integer >= 0.")
    if sys.platform != "linux":
        raise LaunchError("unitrain run needs Linux, where orphaned processes can be adopted: use another launcher.")
    if not command:
        raise LaunchError("no command was given: write it after --, as in unitrain run -- mpirun -np 2 ...")
    # Orphaned descendants become children of this process, in whichever session they are.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Of an earlier life: exec unitrain run, in a shell that has started others.
    earlier = set(psutil.Process().children())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_SIGNALS, signal.SIGCHLD})
    try:
        return _run(command, max_restarts, mask, earlier)
    finally:
        _kill_all(earlier)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run(command: Sequence[str], max_restarts: int, mask: Iterable[int], earlier: set[psutil.Process]) -> int:
    """Run the command, again after each unexpected failure, and return the exit code of ``run``.

    Args:
        command: as in ``run``.
        max_restarts: as in ``run``.
        mask: the signals that are blocked in the command.
        earlier: as in ``_kill_all``.
    """
    for restart in range(1, max_restarts + 2):
        attempt = _Attempt(command, mask)
        started = time.monotonic()
        code = attempt.wait()
        # Ranks of a failed attempt would hold GPUs and ports that the next one needs.
        _kill_all(earlier)
        seconds = time.monotonic() - started
        if attempt.stopped or code in _FINAL_CODES or not max_restarts:
            break
        ended = f"{command[0]} {_describe(code)} after {seconds:.{0 if seconds >= 10 else 1}f} s"
        if restart > max_restarts:
            _print(f"{ended}; no restarts left (--max-restarts {max_restarts}).")
            break
        # A command that fails at once would otherwise use up its restarts within seconds, while a host comes back, say.
        pause = min(2.0 ** (restart - 1), _LONGEST_PAUSE_S)
        _print(f"{ended}; restart {restart} of {max_restarts} in {pause:g} s.")
        stop = signal.sigtimedwait(_awaited(), pause)
        if stop is not None:
            return 128 + stop.si_signo
    return code if code >= 0 else 128 - code


def _awaited() -> frozenset[signal.Signals]:
    """Return the signals that stop the command: not SIGHUP if this process ignores it, as under nohup."""
    return _SIGNALS - {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else _SIGNALS


class _Attempt:
    """One run of the command.

    Attributes:
        stopped: whether a signal to stop has been forwarded, so that the command is not restarted.
    """

    def __init__(self, command: Sequence[str], mask: Iterable[int]) -> None:
        self.stopped = False
        self._signalled: list[psutil.Process] = []
        self._leave_by = math.inf

        def prepare() -> None:
            # If this process is killed, the command gets a SIGTERM; a launcher then ends its ranks.
            end_with_parent(signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            # In another session, so that Ctrl-C and a closed terminal reach the ranks through here only, once.
            self._process = subprocess.Popen(command, start_new_session=True, preexec_fn=prepare)
        except OSError as error:
            raise LaunchError(
                f"{command[0]!r} can't be started ({error.strerror}): give a program on PATH, or its path."
            ) from error

    def wait(self) -> int:
        """Forward signals until the command ends. Return its exit code, negative if a signal killed it."""
        terminated = False
        while True:
            received = signal.sigtimedwait({*_awaited(), signal.SIGCHLD}, _CHECK_S)
            number = signal.SIGCHLD if received is None else received.si_signo
            if number == signal.SIGCHLD:
                code = self._reap()
                if code is not None:
                    return code
                self._end_launcher()
            elif terminated and number in (signal.SIGTERM, signal.SIGINT):
                return -number  # the second: who sends it does not want to wait until the ranks have saved
            elif not terminated and not (self.stopped and number == signal.SIGUSR1):
                terminated = number != signal.SIGUSR1
                self._stop(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        """Send a signal to the ranks on this host, or to the command if there are none."""
        self.stopped = True
        self._leave_by = time.monotonic() + _LEAVE_S
        self._signalled = _receivers(psutil.Process(self._process.pid), number)
        for process in self._signalled:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _end_launcher(self) -> None:
        """End a launcher that keeps running after its ranks have stopped: torchrun, say, which may restart them."""
        if any(process.is_running() for process in self._signalled):
            self._leave_by = time.monotonic() + _LEAVE_S
        elif time.monotonic() > self._leave_by:
            # SIGTERM ends torchrun for good. It would take the end of its ranks for a failure, and start them again.
            self._process.terminate()

    def _reap(self) -> int | None:
        """Reap children that have ended, including adopted orphans. Return the command's exit code, if it has ended."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._process.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                return self._process.returncode
            # Nothing else has ended. ChildProcessError is impossible while the command itself is a child.
            if pid == 0:
                return None


def _receivers(command: psutil.Process, number: signal.Signals) -> list[psutil.Process]:
    """Return the processes to signal: the ranks on this host that handle the signal, or the command if there are none.

    Of a shell and the program that it runs, the one that handles the signal gets it: it would kill the other.
    """
    family = [command, *command.children(recursive=True)]
    ranks = [process for process in family if _is_rank(process)] or family
    handling = [process for process in ranks if _handles(process, number)]
    # What a rank has started is the rank's to stop.
    return [process for process in handling if not _ancestors(process) & set(handling)] or [command]


def _ancestors(process: psutil.Process) -> set[psutil.Process]:
    """Return the parent of a process, its parent, and so on; none if the process has just ended."""
    with suppress(psutil.Error):
        return set(process.parents())
    return set()


def _is_rank(process: psutil.Process) -> bool:
    """Return whether a process is a rank: a launcher has set its rank, or has changed the rank that it inherited."""
    with suppress(psutil.Error, OSError):  # the process has just ended
        environ = process.environ()
        return any(name in environ and environ[name] != os.environ.get(name) for name in _RANK_VARIABLES)
    return False


def _handles(process: psutil.Process, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal, according to the mask SigCgt in proc(5)."""
    with suppress(OSError, IndexError):  # the process has just ended
        caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def _kill_all(spared: set[psutil.Process]) -> None:
    """Kill all descendants of this process, except for some of its children and theirs."""
    # Again and again: an orphan becomes a child of this process as soon as its parent has died.
    while children := set(psutil.Process().children()) - spared:
        for child in children:
            for process in (child, *child.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        psutil.wait_procs(children)


def _describe(code: int) -> str:
    """Return how a process has ended, given its exit code, which is negative if a signal killed it."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _print(line: str) -> None:
    print_stderr(f"unitrain run: {line}")
